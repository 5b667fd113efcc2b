"""The code location of the stock prices: one graph of `dtrain_dagster.pipelines`, whose names have no prefix.

From *Materialize* to a node's first step: `pipelines.build_graph` builds the assets and their checks, one module of
`assets` each. The body of `assets.training` asks `assets.cluster_run` for nodes and leave to spend, chooses or starts
the job with `jobs.start`, which hands it to the cluster's manager. That of Azure ML orders nodes of the service; the
others (`clusters.managers`) start a supervisor, the process `clusters.supervise`, and its placer starts the nodes.

A further cluster is an engine in `clusters` and a line in `clusters.managers`, `settings.cluster_kinds` and
`settings.engines`; a check is in `assets.checks`; a price in `costs/price_table.json`.

No heavy import happens here, and no I/O but that the trainer's sources are read for the code version of assets.
"""

# ruff: noqa: E402
import gc
from dataclasses import replace

import dagster as dg

# Dagster's hundred thousand objects stay for as long as the process lives: the collections of garbage that our own
# imports and everything after them set off need not walk over them again. What is freed by counting references still
# is; a cycle among them that became garbage later would stay, and modules, classes and functions make none.
gc.freeze()

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
