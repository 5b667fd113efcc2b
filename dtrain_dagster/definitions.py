"""The code location of the stock prices: one graph of `dtrain_dagster.pipelines`, whose names have no prefix.

From *Materialize* to a node's first step: `pipelines.build_graph` builds the assets and their checks, one module of
`assets` each. On a fresh machine the first job is the probe of `assets.planning`. Then the body of `assets.training`
asks `assets.cluster_run` for nodes and leave to spend, chooses its job (`jobs.progress`) and starts it (`jobs.start`)
on the cluster, which `configuration.ClusterConfiguration.manager` picks. That of Azure ML orders nodes of the service;
the others (`clusters.managers`) start a supervisor, the process `clusters.supervise`, and its placer starts the nodes.
A rank is `trainer.__main__`: `trainer.engine.run_job` sets up `trainer.engine.trainer`, whose steps are
`trainer.engine.step`. `assets.training_progress` follows the job meanwhile.

A further cluster is a subclass of `clusters.supervision.engine.Engine` in a folder of `clusters`, with settings beside
`settings.slurm`, and a line in `clusters.managers.ENGINE_CLASSES`, `settings.engines.ENGINE_SETTINGS` and
`settings.cluster_kinds`, where its name is. A check of a training is a line in `assets.checks.TRAINING_CHECKS`. A price
is a figure under ``prices`` in `costs/price_table.json`; a new size needs a row under ``skus``, too.

No heavy import happens here, and no I/O but that the trainer's sources are read for the code version of assets.
"""

# ruff: noqa: E402
import gc
from dataclasses import replace

import dagster as dg

# Dagster's hundred thousand objects stay for as long as the process lives: the collections of garbage that our own
# imports and everything after them set off need not walk over them again. What is freed by counting references still
# is; a cycle among them that became garbage later would stay, and modules, classes and functions make none. The objects
# of torch and MLflow, which assets load, stay as well: with a higher threshold they set off far fewer collections.
gc.freeze()
gc.set_threshold(10_000, 10, 10)

from dtrain_dagster.assets.pipeline import STOCK
from dtrain_dagster.pipelines import build_graph
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings.environment import Settings, load_settings
from dtrain_dagster.settings.variables import warn_of_variables
from dtrain_dagster.support.console import console


def build_defs(settings: Settings | None = None) -> dg.Definitions:
    """Return the code location of the stock prices. Raise `dtrain_dagster.settings.environment.SettingsError` for an
    unusable environment."""
    settings = settings or load_settings()
    warn_of_variables()
    return dg.Definitions.merge(
        build_graph(replace(STOCK, cluster=settings.cluster_key), settings, build_resources(settings)),
        # Why in one process: `dtrain_dagster.pipelines.build_graph`.
        dg.Definitions(executor=dg.in_process_executor, loggers={"console": console}),
    )


defs = build_defs()
