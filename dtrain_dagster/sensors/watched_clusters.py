"""What sensors on clusters share: which one watches a cluster that several graphs of a code location train on, the
assets that it reports to, and prices."""

from __future__ import annotations

import dagster as dg

from dtrain_dagster.assets.training import CLUSTER_TAG
from dtrain_dagster.costs.prices import PriceError, price_of
from dtrain_dagster.resources import GPUClusterResource
from dtrain_dagster.settings.cluster_kinds import tier_of
from dtrain_dagster.support.graph_names import GraphNames

ELSEWHERE = "the cluster is watched by the sensor of another graph, the first by name, which reports for all"


def watched_clusters(context: dg.SensorEvaluationContext, names: GraphNames) -> list[dg.AssetKey]:
    """Return the keys of the assets `gpu_cluster` of all graphs on the cluster of this one, for the sensor of the first
    of them by name; none for those of the others, so that nobody is told twice and nothing is ended twice. Graphs are
    defined one by one, and know nothing of each other: the code location that ticks knows them all."""
    own = names.key("gpu_cluster")
    if context.repository_def is None:  # not of a daemon
        return [own]
    graph = context.repository_def.asset_graph
    mine = graph.get(own).tags[CLUSTER_TAG]
    alike = [key for key in graph.get_all_asset_keys() if graph.get(key).tags.get(CLUSTER_TAG) == mine]
    alike.sort(key=lambda key: (len(key.path), key))  # the graph without a name is first
    return alike if alike[0] == own else []


def usd_per_node_hour(sku: str, tier: str | None, cluster: GPUClusterResource) -> float | None:
    """Return the price; None where the price table has none. ``tier``: None or "" for the cluster's."""
    try:
        return price_of(sku).usd_per_hour(tier_of(tier or cluster.tier))
    except PriceError:
        return None
