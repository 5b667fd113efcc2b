"""The memory of a planned training: checked on its nodes, and on those that the plan compares it with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dtrain_dagster.costs.prices import SkuPrice, alternatives_to
from dtrain_dagster.planning.build_plan import PlannedJob
from dtrain_dagster.planning.check_job import Checked, check_memory
from dtrain_dagster.planning.memory_fit import room_of, room_of_sku, why_too_small

TooSmall = Callable[[SkuPrice, int], str]
"""Why so many nodes of a SKU have too little memory; "" if they have enough, or that is not known."""


def memory_of(planned: PlannedJob, checked: Checked) -> tuple[TooSmall, tuple[str, ...]]:
    """Return which other nodes are too small for a planned training, and sentences on what is known of it. Raise
    `trainer.config.ConfigError` where its own nodes are too small."""
    price, tier, count, each = planned.price, planned.tier, planned.node_count, planned.sizes.processes_per_node
    model = checked.model or (planned.script.model if planned.script else None)
    room = room_of(planned.kind, price, tier, count, each)
    prices = tuple(alternatives_to(price.sku).values()) if planned.kind.buys_nodes else ()
    checked = check_memory(replace(checked, model=model), planned.job.training, room, prices)

    def too_small(other: SkuPrice, nodes: int) -> str:
        if model is None or room is None:
            return ""
        if other.sku == price.sku:
            there = room.on_nodes(nodes)
        elif planned.kind.buys_nodes:
            there = room_of_sku(other, nodes, other.gpus or each)
        else:
            return ""  # the price of another SKU stands in for the same nodes
        return why_too_small(model, planned.job.training, there)

    return too_small, checked.sentences
