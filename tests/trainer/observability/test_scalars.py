"""The curves of a training: of each node, over all nodes, and where the time goes."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.observability.scalars import Scalars
from trainer.rundir import event


def node(node_id: int, **fields: Any) -> dict[str, Any]:
    return event("node", 0, 1, node_id=node_id, step=7, **fields)


def drawn(scalars: Scalars, *events: dict[str, Any]) -> dict[str, tuple[int, float]]:
    return {item.name: (item.step, pytest.approx(item.value)) for item in scalars.of(events)}


def test_nodes_are_drawn_one_by_one_and_as_a_whole_without_those_that_are_lost() -> None:
    scalars = Scalars()
    first = drawn(
        scalars,
        event("step", 0, 1, step=8, epoch=0, loss=None, learning_rate=0.1),  # of an older trainer: some fields only
        node(0, gpu_utilization=90.0, gpu_temperature_celsius=60.0, gpu_power_watts=200.0, samples_per_second=10.0),
        node(1, gpu_utilization=70.0, gpu_temperature_celsius=80.0, gpu_power_watts=100.0, samples_per_second=None),
    )
    assert first == {
        "train/learning_rate": (8, 0.1),
        "train/epoch": (8, 1),  # people count from 1
        "node_0/gpu_utilization": (7, 90),
        "node_0/gpu_temperature_celsius": (7, 60),
        "node_0/gpu_power_watts": (7, 200),
        "node_0/samples_per_second": (7, 10),
        "node_1/gpu_utilization": (7, 70),
        "node_1/gpu_temperature_celsius": (7, 80),
        "node_1/gpu_power_watts": (7, 100),
        "cluster/gpu_utilization": (8, 80),
        "cluster/gpu_temperature_celsius": (8, 80),
        "cluster/gpu_power_watts": (8, 300),
        "cluster/samples_per_second": (8, 10),
    }
    after = drawn(scalars, event("membership", 0, 2, nodes=[1, 2]), node(2, gpu_utilization=50.0))
    assert after["cluster/gpu_utilization"] == (8, 60), "node 0 is gone"


def test_where_a_step_spends_its_time() -> None:
    timing = event(
        "timing", 0, 1, step=20, steps=10, seconds=0.2, nodes=[0, 0, 3],
        segments={
            "forward": [0.11, 0.11, 0.11], "waiting": [0.05, 0.07, 0.0], "communication": [0.05, 0.05, 0.05],
        },
    )  # fmt: skip
    assert drawn(Scalars(), timing, event("timing", 0, 1, step=30)) == {
        "time/forward_milliseconds": (20, 110),
        "time/waiting_milliseconds": (20, 40),
        "time/communication_milliseconds": (20, 50),
        "communication/share": (20, 0.25),
        "node_0/waiting_milliseconds": (20, 60),
        "node_3/waiting_milliseconds": (20, 0),
    }
