"""What is recommended for the next run, only where little was used, with figures that a simulated run then has; and one
dollar figure for a change in the plan, in the alert of a job that goes on, and in the advice after it."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from dtrain_dagster.costs.estimate import Interval, estimate_cost
from dtrain_dagster.costs.prices import price_of, price_table
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.jobs.view import JobView
from dtrain_dagster.monitoring.strategies import longest_world, step_model
from dtrain_dagster.monitoring.windows import seconds_of, settled, windows
from dtrain_dagster.planning.optimizer import (
    BaseRun,
    ResourceOptimizer,
    build_options,
    gpu_memory,
    rest_of,
    savings,
    utilization,
)
from dtrain_dagster.planning.projection import Projection
from tests.dtrain_dagster.simulated_timing import Simulation
from trainer.rundir import event

V100 = replace(price_of("Standard_NC6s_v3"), retired_on=None)
TRAINING = {
    "gradient_accumulation_steps": 2, "batch_size_per_gpu": 128, "world_size": 3, "learning_rate": 2e-3,
    "lr_scaling": "none",
}  # fmt: skip
RUN = Simulation(windows=40, noise=0.0, outliers=0.0, computing=0.02, latency=0.02)
"""A step of which more than half is communication."""
AROUND = 100.0
"""Seconds of a run that are no steps."""
GIB = 2**30
TODAY = date(2026, 3, 1)


def looks(used: float = 0.3, memory: float = 0.9, **fields: Any) -> list[dict[str, Any]]:
    """One look at each of three nodes with a GPU."""
    gpu = {"memory_used_bytes": int(memory * 16 * GIB), "memory_total_bytes": 16 * GIB}
    return [
        event("node", node, 1, node_id=node, gpu_utilization=100 * used, gpus=[gpu], cpu_percent=5.0) | fields
        for node in (10, 11, 12)
    ]


def seconds_of_steps(simulation: Simulation) -> float:
    """Of as many steps as `RUN` has."""
    return step_model(settled(windows(simulation.events()))).seconds * 10 * RUN.windows


def optimizer(extra: list[dict[str, Any]], **other: Any) -> ResourceOptimizer:
    wall = AROUND + seconds_of_steps(RUN)
    usage = [NodeUsage(node_id=node, sku=V100.sku, started_at=0.0, ended_at=wall) for node in (10, 11, 12)]
    given: dict[str, Any] = {
        "price": V100,
        "tier": "dedicated",
        "training": TRAINING,
        "prices": price_table().values(),
        "today": TODAY,
    } | other
    return ResourceOptimizer([*RUN.events(), *extra], usage, **given)


def test_less_than_half_used_is_answered_with_dollars_and_seconds_that_come_true():
    looked_at = optimizer(looks(used=0.3))
    found = {item.setting.split(" = ")[0]: item for item in looked_at.recommendations()}
    assert set(found) == {"DTRAIN_NODES", "DTRAIN_GPU_TYPE", "DTRAIN_TIER"}
    wall, usd = looked_at.wall_seconds, looked_at.usd

    alone = AROUND + seconds_of_steps(replace(RUN, ranks=1, micro_batches=(6,), latency=0.0, buckets=()))
    fewer = found["DTRAIN_NODES"]
    assert fewer.setting == "DTRAIN_NODES = 1, gradient_accumulation_steps = 6: the global batch stays"
    assert fewer.lost_seconds == pytest.approx(alone - wall, rel=0.1)
    assert fewer.saved_usd == pytest.approx(usd - alone / 3600 * V100.usd_per_hour("dedicated"), rel=0.02)
    assert looked_at.markdown().startswith("GPU utilisation was 30%.")

    smaller = found["DTRAIN_GPU_TYPE"]
    t4 = price_of("Standard_NC4as_T4_v3")
    slow = AROUND + seconds_of_steps(replace(RUN, computing=0.02 / t4.speed))
    assert smaller.setting == f"DTRAIN_GPU_TYPE = {t4.sku}"
    # At most: a longer backward pass hides more of the communication.
    assert slow - wall <= smaller.lost_seconds < 1.6 * (slow - wall)
    best = usd - 3 * slow / 3600 * t4.usd_per_hour("dedicated")
    assert 0.95 * best < smaller.saved_usd <= best

    assert found["DTRAIN_TIER"].lost_seconds == pytest.approx(0)
    assert found["DTRAIN_TIER"].setting == "DTRAIN_TIER = spot"
    assert "evicted at any time" in found["DTRAIN_TIER"].why
    assert usd / 2 < found["DTRAIN_TIER"].saved_usd < usd


@pytest.mark.parametrize(("used", "count"), [(0.49, 3), (0.5, 0), (0.9, 0)])
def test_who_uses_half_is_left_alone(used: float, count: int):
    assert len(optimizer(looks(used)).recommendations()) == count


def test_fewer_nodes_are_for_those_who_wait_for_each_other():
    """Computing that is divided among nodes costs the same on fewer of them, and takes longer."""
    slow = replace(RUN, computing=1.0, latency=0.0, buckets=(1000,)).events()
    wall = max(item["time"] for item in slow) - 1e6
    usage = [NodeUsage(node_id=node, sku=V100.sku, started_at=0.0, ended_at=wall) for node in (10, 11, 12)]
    found = ResourceOptimizer(
        [*slow, *looks()], usage, price=V100, tier="dedicated", training={}, prices=[], today=TODAY,
    )  # fmt: skip
    assert [item.name for item in found.recommendations()] == ["spot"]


def test_nodes_that_share_a_model_are_as_few_as_can_hold_it():
    def nodes(strategy: str) -> str:
        found = optimizer(looks(memory=0.5), training={**TRAINING, "strategy": strategy}).recommendations()
        return next(item.setting for item in found if item.name == "fewer nodes").split(",")[0]

    assert (nodes("ddp"), nodes("fsdp")) == ("DTRAIN_NODES = 1", "DTRAIN_NODES = 2")


def test_a_smaller_sku_is_there_offered_and_large_enough():
    def skus(**other: Any) -> list[str]:
        memory = other.pop("memory", 0.5)
        return [item.setting.rpartition(" ")[2] for item in optimizer(looks(memory=memory), **other).recommendations()]

    t4 = price_of("Standard_NC4as_T4_v3")
    assert t4.sku in skus(prices=[t4])
    assert t4.sku not in skus(prices=[t4], memory=0.95), "15.2 of 16 GiB: the next that is as large may be too small"
    assert t4.sku not in skus(prices=[replace(t4, retired_on="2026-02-28")])
    assert t4.sku not in skus(prices=[replace(t4, figures={})])
    assert t4.sku not in skus(prices=[replace(t4, gpus=4)])


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([{"node_id": 0, "gpu_utilization": 40.0}, {"node_id": 1, "gpu_utilization": 60.0}], (0.5, "GPU", 2)),
        # nodes of one machine: each has its share of the processors; of a GPU that all look at, each tells the same
        ([{"node_id": n, "hostname": "a", "cpu_percent": 30.0} for n in range(3)], (0.9, "CPU", 1)),
        ([{"node_id": n, "hostname": "a", "gpu_utilization": 30.0} for n in range(3)], (0.3, "GPU", 1)),
    ],
)
def test_utilization_is_that_of_machines(nodes: list[dict[str, Any]], expected: tuple[float, str, int]):
    found = utilization(event("node", 0, 1, **fields) for fields in nodes)
    assert found
    assert (found.fraction, found.of, found.machines) == (pytest.approx(expected[0]), *expected[1:])
    assert utilization([event("step", 0, 1)]) is None


def test_a_batch_for_memory_that_is_not_used_and_what_it_does_to_the_training():
    [found] = optimizer(looks(used=0.9, memory=0.2)).recommendations()
    parameters = 2_000_000
    sample = (0.2 * 16 * GIB - 4 * parameters) / 128
    batch = int((0.85 * 16 * GIB - 4 * parameters) / sample) // 8 * 8
    assert found.setting == f"training.batch_size_per_gpu = {batch} (now 128)"
    assert f"{sample / 2**20:.3g} MiB for each of 128 samples" in found.why
    assert f"grows from 768 to {batch * 6} samples" in found.why
    assert "check the learning rate (training.lr_scaling)" in found.why
    assert found.lost_seconds < 0 < found.saved_usd

    assert not optimizer(looks(used=0.9, memory=0.71)).recommendations()


@pytest.mark.parametrize(
    "extra",
    [
        looks(gpus=[], gpu_utilization=None, cpu_percent=80.0),
        [*looks(used=0.9, memory=0.2), event("out_of_memory", 0, 1, samples=64)],
        [],
    ],
    ids=["no GPU's memory was measured", "memory ran out", "no node was sampled"],
)
def test_nothing_is_recommended_about_what_cannot_be_told(extra: list[dict[str, Any]]):
    assert not optimizer(extra).recommendations()


T4 = "Standard_NC4as_T4_v3"


@pytest.mark.parametrize("is_timed", [False, True])
def test_a_change_costs_the_same_in_plan_alert_and_advice(is_timed: bool):
    """A run of steps and nothing else, on three nodes, of which little is used."""
    events = [*(RUN.events() if is_timed else []), *looks(memory=0.25)]
    seconds, table = seconds_of(windows(events)) or 3600.0, {V100.sku: V100, T4: price_of(T4)}
    usage = [NodeUsage(node_id=node, sku=V100.sku, started_at=0.0, ended_at=seconds) for node in (10, 11, 12)]
    looked_at = ResourceOptimizer(
        events, usage, price=V100, tier="dedicated", training=TRAINING, prices=table.values(), today=TODAY
    )
    usd = looked_at.usd
    projection = Projection(so_far=0.0, estimated=usd, at_end=Interval(low=usd, expected=usd, high=usd))
    rest = rest_of(usage, table, projection, {"tier": "dedicated"}, JobView())
    alert = {item.name: item for item in savings(rest, settled(windows(events)), events, TRAINING, table, TODAY)}
    advice = {item.name: item for item in looked_at.recommendations()}
    assert alert.keys() == {"spot", "other SKU", *(["fewer nodes"] if is_timed else [])}
    assert advice.keys() == ({*alert.keys(), "larger batch"} if is_timed else {"spot"})
    for name, change in alert.items():
        assert name not in advice or change.saved_usd == pytest.approx(advice[name].saved_usd), name
        value = change.setting.split(",")[0].rpartition(" ")[2]
        price = price_of(value) if name == "other SKU" else V100
        count = int(value) if name == "fewer nodes" else 3
        took = Interval(low=0.0, expected=change.document()["seconds"], high=seconds)
        planned = estimate_cost(took, price, "spot" if name == "spot" else "dedicated", count)
        assert usd - change.saved_usd == pytest.approx(planned.usd.expected), name


def test_starting_again_is_paid_where_nodes_change_and_only_there():
    usd = 2 * 10 * V100.usd_per_hour("dedicated")
    base = BaseRun(price=V100, tier="dedicated", node_count=2, seconds=36000.0, usd=usd, step_seconds=36000.0)
    again, world = replace(base, restart_seconds=900.0), longest_world(settled(windows(RUN.events())))
    memory = gpu_memory(world, looks(memory=0.25), TRAINING)
    for kind, more in (("spot", 900.0), ("larger batch", 0.0)):
        first, second = (
            next(row for row in build_options(item, world, memory, TRAINING, [], TODAY) if row.name == kind)
            for item in (base, again)
        )
        assert second.lost_seconds - first.lost_seconds == pytest.approx(more)
