"""A language model of bytes as a graph of assets: the source of Python's standard library becomes a dataset, and a
small transformer, whose parameters two ranks share (FSDP), learns from it. The README beside this file says how to
start it.
"""

import sysconfig

import dagster as dg

from dtrain_dagster.data.tokens import TokenParams, build_tokens
from dtrain_dagster.pipelines import Cluster, build_training_assets
from dtrain_dagster.settings.environment import load_settings


@dg.asset(group_name="sources", description="The source of Python's standard library as a dataset of bytes.")
def python_source() -> str:
    """Return the folder of the dataset. Modules are divided among the splits."""
    params = TokenParams(context=128, valid_fraction=0.02, test_fraction=0.02)
    return build_tokens(sysconfig.get_paths()["stdlib"], load_settings().storage_uri, params, "*.py").uri


@dg.definitions
def language_model() -> dg.Definitions:
    """Return the source's asset and the graph of the training on it."""
    training = build_training_assets(
        "python_bytes",
        python_source,
        model="gpt",
        model_args={"width": 96, "layers": 3},
        training={
            "strategy": "fsdp",
            "max_steps": 400,
            "batch_size_per_gpu": 16,
            "gradient_accumulation_steps": 1,
            "learning_rate": 3e-3,
        },
        cluster=Cluster(nodes=2),
    )
    return dg.Definitions.merge(training, dg.Definitions(assets=[python_source]))
