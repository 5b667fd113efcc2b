"""A training on its nodes, of which only what its choices are made from is known."""

from __future__ import annotations

from dtrain_dagster.costs.estimate import Sizes
from dtrain_dagster.costs.prices import SkuPrice
from dtrain_dagster.planning.build_plan import PlannedJob
from dtrain_dagster.settings.cluster_kinds import KINDS, Tier


def planned_on(
    price: SkuPrice, node_count: int, tier: Tier = "dedicated", ranks: int = 1, batch: int = 64, kind: str = "azure_ml"
) -> PlannedJob:
    sizes = Sizes(
        train_samples=6 * batch, valid_samples=1, test_samples=1, batch_size_per_rank=batch, micro_batches_per_rank=1,
        processes_per_node=ranks, epochs=1, max_steps=None, eval_frequency=None, checkpoint_frequency=100,
    )  # fmt: skip
    return PlannedJob(
        job=None, sizes=sizes, fingerprint="", pace="", price=price, tier=tier, node_count=node_count, kind=KINDS[kind]
    )  # type: ignore[arg-type]  # fmt: skip
