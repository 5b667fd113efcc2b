"""How training scales: what `benchmarks.scaling` concludes from its trainings."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.scaling import ScalingPoint, efficiency, read_point, summarize_scaling

TRAINING = {"gradient_accumulation_steps": 2, "batch_size_per_gpu": 128}
COMPUTE, NETWORK = 0.040, 0.020
"""Seconds of a micro-batch on one rank, and of a step's communication in a world of several."""


def events_of(world: int, accumulation: int, crowded: float) -> list[dict[str, Any]]:
    """Events of a short training, in which the first window has cold caches."""
    compute, network = COMPUTE * accumulation * crowded, NETWORK * (world > 1)
    parts = {"forward": 0.4 * compute, "backward": 0.5 * compute, "optimizer": 0.1 * compute, "communication": network}
    events: list[dict[str, Any]] = []
    for number in range(6):
        slow = 5.0 if number == 0 else 1.0
        at = {"time": 1.7e9 + number, "step": 2 * number + 2}
        segments = {name: [slow * value] * world for name, value in parts.items()}
        events.append({"kind": "step", "step_seconds": slow * (compute + network), **at})
        events.append({"kind": "timing", "steps": 2, "nodes": list(range(world)), "segments": segments, **at})
    return events


def point_of(world: int, mode: str = "weak", crowded: float = 1.0) -> ScalingPoint:
    """A point of one rank per node. Strong: six micro-batches in all; weak: two for each rank."""
    accumulation = 6 // world if mode == "strong" else 2
    training = TRAINING | {"world_size": world, "gradient_accumulation_steps": accumulation}
    return read_point(events_of(world, accumulation, crowded), mode, world, training, 98_538, 3.06)


def test_a_point_leaves_the_warm_up_out_and_prices_an_epoch() -> None:
    point = point_of(3)
    assert (point.global_batch, point.world_size) == (768, 3)
    assert point.step_seconds == point.step_seconds_high == pytest.approx(0.100)
    assert point.compute_seconds == pytest.approx(0.080)
    assert point.communication_to_compute == pytest.approx(0.25)
    assert point.samples_per_second == pytest.approx(7680)
    assert point.usd_per_epoch == pytest.approx(3 * 3.06 / 3600 * 0.100 * 129)  # 128.3 steps of 768 samples
    with pytest.raises(ValueError, match="too short"):
        read_point(events_of(2, 2, 1.0)[:2], "weak", 2, TRAINING | {"world_size": 2}, 1000, 1.0)


def test_efficiency_is_the_pace_of_a_rank_against_that_of_one_in_the_smallest_world() -> None:
    points = [point_of(world, mode) for mode in ("weak", "strong") for world in (1, 2, 3)]
    assert efficiency(points, "weak") == pytest.approx({1: 1.0, 2: 0.8, 3: 0.8})
    assert efficiency(points, "strong") == pytest.approx({1: 1.0, 2: 0.12 / 0.14, 3: 0.8})
    assert efficiency(points[1:3], "weak") == pytest.approx({2: 1.0, 3: 1.0})
    assert efficiency(points[:3], "strong") == {}


@pytest.mark.parametrize(
    ("points", "cores", "said"),
    [
        ([point_of(1)], None, "One rank only: there is nothing to compare with."),
        ([point_of(2)], None, "2 ranks only: there is nothing to compare with."),
        ([point_of(1), point_of(2)], None, "2 ranks work at 80% of the pace of 1 rank(s) each (weak scaling); "
         "communication takes 20% of a step."),
        ([point_of(2), point_of(3, crowded=1.5)], 2.0, "3 ranks work at 71% of the pace of 2 rank(s) each (weak "
         "scaling); they share 2 core(s), which alone can cost up to 33% of that pace; communication takes 14% of a "
         "step."),
        ([point_of(4), point_of(6)], 2.0, "6 ranks work at 100% of the pace of 4 rank(s) each (weak scaling); they "
         "share 2 core(s), which alone can cost up to 33% of that pace; communication takes 20% of a step."),
    ],
    ids=["one rank", "one world", "own cores", "fewer cores than the largest", "fewer cores than both"],
)  # fmt: skip
def test_the_verdict_compares_with_what_was_measured(
    points: list[ScalingPoint], cores: float | None, said: str
) -> None:
    assert summarize_scaling(points, cores) == said
