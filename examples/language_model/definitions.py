"""The language model of bytes as a graph of assets: `train.py` beside this file, on two nodes, which share its
parameters (FSDP). The README beside this file says how to start it.
"""

from pathlib import Path

import dagster as dg

from dtrain_dagster.pipelines import Cluster, build_training_assets


@dg.definitions
def language_model() -> dg.Definitions:
    """Return the graph of the training."""
    return build_training_assets("python_bytes", script=Path(__file__).with_name("train.py"), cluster=Cluster(nodes=2))
