"""How training scales: the arithmetic, against worlds whose link is known; and ways to sum side by side."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from benchmarks.scaling_figures import ScalingPoint, against_plain, efficiency, read_point
from benchmarks.scaling_model import (
    LINKS,
    SIZES,
    TOLERANCE,
    ScalingLink,
    ScalingModel,
    all_reduce_seconds,
    fit_scaling_link,
    modelled,
    predict,
    study,
)
from trainer.performance.link import Link

SLOW = ScalingLink(name="slow", message=Link(latency_seconds=2e-4, seconds_per_byte=1e-8), source="made up")
BUCKETS = (1_000_000, 400_000)
TRAINING = {"gradient_accumulation_steps": 2, "batch_size_per_gpu": 128}


def run_of(
    world: int, mode: str, seed: int = 0, crowded: float = 1.0, other: float = 0.0, start: float = 0.0
) -> list[dict[str, Any]]:
    """Events of a short run whose compute is 40 ms a micro-batch and whose link is `SLOW`. ``other``: local work around
    the compute, as a share of it; ``start``: seconds of communication besides what its sums take."""
    chance = random.Random(f"{seed} {world} {mode}")
    micro_batches = 2 * world if mode == "weak" else 6
    events: list[dict[str, Any]] = []
    for interval in range(12):
        compute = 0.040 * math.ceil(micro_batches / world) * crowded * chance.gauss(1, 0.004)
        network_times = [all_reduce_seconds(size, world, SLOW) for size in (*BUCKETS, 48)]
        exposed = network_times[1] + max(0.0, network_times[0] - 0.020) + network_times[2] + start * (world > 1)
        segments = {
            "input": 0.0, "forward": 0.4 * compute, "backward": 0.5 * compute, "optimizer": 0.1 * compute,
            "communication": exposed, "waiting": 0.0, "checkpoint": 0.0,
            "other": other * compute,
        }  # fmt: skip
        slow = 5.0 if interval == 0 else 1.0  # caches are cold
        collectives = [
            {"name": name, "bytes": size, "wire_seconds": seconds}
            for name, size, seconds in zip(
                ("bucket 0", "bucket 1", "commit"), (*BUCKETS, 304), network_times, strict=True
            )
        ]
        at = {"time": 1.7e9 + interval, "step": 2 * interval + 2}
        events.append({"kind": "step", "step_seconds": slow * ((1 + other) * compute + exposed)} | at)
        events.append({
            "kind": "timing", "steps": 2, "nodes": list(range(world)), "collectives": collectives if world > 1 else [],
            "segments": {name: [slow * value] * world for name, value in segments.items()}, **at,
        })  # fmt: skip
    return events


def point_of(world: int, mode: str, **more: Any) -> ScalingPoint:
    training = TRAINING | {"world_size": world}
    if mode == "strong":
        training["gradient_accumulation_steps"] = 6 // world
    return read_point(run_of(world, mode, **more), mode, world, training, 98_538, 3.06)


def test_a_point_leaves_the_warm_up_out_and_prices_an_epoch() -> None:
    point = point_of(3, "weak")
    assert point.step_seconds == pytest.approx(0.080 + point.network_seconds, rel=0.01)
    assert point.compute_seconds == pytest.approx(0.080, rel=0.01)
    assert point.global_batch == 768
    assert point.usd_per_epoch == pytest.approx(3 * 3.06 / 3600 * point.step_seconds * math.ceil(98_538 / 768))
    assert 0 < point.noise_seconds < 0.01
    with pytest.raises(ValueError, match="too short"):
        read_point(run_of(2, "weak")[:2], "weak", 2, TRAINING | {"world_size": 2}, 1000, 1.0)


def test_efficiency_is_the_pace_of_a_rank_against_that_of_one_alone() -> None:
    points = [point_of(world, mode) for mode in ("weak", "strong") for world in (1, 2, 3)]
    weak, strong = efficiency(points, "weak"), efficiency(points, "strong")
    assert weak[1] == strong[1] == 1
    expected = 0.080 / (0.080 + point_of(3, "weak").network_seconds)
    assert weak[3] == pytest.approx(expected, rel=0.01)
    assert strong[2] > weak[2], "more to compute for the same to send: a step of three is shared by two"


@pytest.mark.parametrize("sizes", [(48, 400_000, 1_000_000), (48, 40_000_000)])
def test_a_link_is_found_from_what_it_did(sizes: tuple[int, ...]) -> None:
    true = Link(latency_seconds=50e-6, seconds_per_byte=1 / 3e9)
    observed = [
        (world, size, 2 * (world - 1) * 50e-6 + 2 * (world - 1) / world * size / 3e9) for world in (2, 3)
        for size in sizes
    ]  # fmt: skip
    found = fit_scaling_link(observed, "found").message
    assert found.latency_seconds == pytest.approx(true.latency_seconds, rel=1e-6)
    assert found.bytes_per_second == pytest.approx(true.bytes_per_second, rel=1e-6)


def test_one_size_alone_is_explained_by_one_cause() -> None:
    found = fit_scaling_link([(2, 1_000_000, 0.01)], "found")
    assert all_reduce_seconds(1_000_000, 2, found) == pytest.approx(0.01)
    with pytest.raises(ValueError, match="no all-reduce was measured"):
        fit_scaling_link([(1, 1_000_000, 0.01)], "found")


def test_the_model_predicts_the_world_that_it_has_not_seen() -> None:
    result = study([point_of(world, mode) for mode in ("weak", "strong") for world in (1, 2, 3)], cores=None)
    assert [(item.world_size, item.mode, item.fitted_on) for item in result.checks] == [
        (3, "weak", (1, 2)), (3, "strong", (1, 2)),
    ]  # fmt: skip
    assert all(abs(item.error) < 0.03 for item in result.checks), result.checks
    assert "misses their step by" in result.verdict
    assert {curve.link.name for curve in result.curves} == {"the link here"} | {link.name for link in LINKS}


def test_more_ranks_than_cores_are_not_blamed_on_distribution() -> None:
    points = [point_of(world, "weak", crowded=max(1.0, world / 2)) for world in (1, 2, 3)]
    blind, seeing = study(points, cores=None).checks[0], study(points, cores=2.0).checks[0]
    assert abs(seeing.error) < 0.03 < 0.2 < abs(blind.error)
    assert "2 core(s)" in study(points, cores=2.0).verdict


def test_cores_that_slow_each_other_down_are_known_from_the_worlds_that_were_seen() -> None:
    """Two ranks on two cores run at 1 / 1.4 of the pace of one, and three share what two have."""
    points = [point_of(world, mode, crowded=1.4 * world / 2 if world > 1 else 1.0) for mode in ("weak", "strong")
              for world in (1, 2, 3)]  # fmt: skip
    result = study(points, cores=2.0)
    assert not result.withheld
    assert all(abs(item.error) < 0.03 for item in result.checks), result.checks
    weak = next(curve for curve in result.curves if curve.mode == "weak" and curve.link == LINKS[-1])
    assert weak.rows[-1][2] > 0.8, "ranks with cores of their own do not slow each other down"
    own = [point_of(world, "weak", crowded=1.4 if world > 1 else 1.0) for world in (1, 2, 3)]
    assert abs(study(own, cores=None).checks[0].error) < 0.03, "on machines of their own the slowdown stays as it is"


def test_work_around_the_computation_and_the_start_of_sums_are_in_the_model() -> None:
    points = [point_of(world, "weak", other=0.5, start=0.03) for world in (1, 2, 3)]
    assert points[0].local_seconds == pytest.approx(0.120, rel=0.01)
    result = study(points, cores=None)
    assert abs(result.checks[0].error) < 0.03
    without = study([point_of(world, "weak", other=0.5) for world in (1, 2, 3)], cores=None)
    slow, fast = (item.curves[len(LINKS)] for item in (result, without))
    assert (slow.mode, slow.link) == (fast.mode, fast.link) == ("weak", LINKS[-1])
    assert slow.rows[1][2] < 0.9 * fast.rows[1][2], "a fast link does not shorten it"


def test_nothing_is_said_of_more_ranks_than_were_measured_where_the_model_misses() -> None:
    points = [point_of(1, "weak"), point_of(2, "weak"), point_of(3, "weak", crowded=2.0)]
    result = study(points, cores=None)
    assert result.error is not None
    assert result.error < -TOLERANCE
    assert result.curves == ()
    said = "No figures are given for more than 3 rank(s): the model, fitted on 1 and 2 rank(s), misses the step of 3"
    assert said in result.withheld
    assert f"by {result.error:+.0%}; its limit is 20%" in result.withheld
    assert result.withheld in result.verdict


def test_where_the_model_met_its_check_the_range_has_its_error() -> None:
    points = [point_of(1, "weak"), point_of(2, "weak"), point_of(3, "weak", crowded=1.1)]
    result = study(points, cores=None)
    assert result.error is not None
    assert -TOLERANCE < result.error < -0.05
    assert not result.withheld
    _, low, middle, _ = result.curves[0].rows[-1]
    assert low < middle / (1 + abs(result.error))


def test_two_node_counts_are_measured_but_not_checked_and_nothing_is_modelled() -> None:
    result = study([point_of(world, "weak") for world in (1, 2)], cores=None)
    assert not result.checks
    assert not result.curves
    assert "the model cannot be checked without runs of one rank and of two other world sizes" in result.verdict
    assert study([point_of(1, "weak")], cores=None).verdict.startswith("One rank only")


def test_the_verdict_compares_with_what_was_measured_and_calls_no_bound_a_share_of_the_loss() -> None:
    result = study([point_of(world, "weak", crowded=world / 2) for world in (2, 3)], cores=2.0)
    assert "3 ranks work at 67% of the pace of 2 rank(s) each" in result.verdict
    assert "they share 2 core(s), which alone can cost up to 33% of that pace" in result.verdict
    fewer = study([point_of(world, "weak") for world in (4, 6)], cores=2.0).verdict
    assert "alone can cost up to 33% of that pace" in fewer, "with 4 ranks they were short of cores already"
    assert study([point_of(2, "weak")], cores=None).verdict.startswith("2 ranks only")


def test_curves_fall_stay_in_their_range_and_reach_256() -> None:
    model = ScalingModel(micro_batch_seconds=0.04, backward_share=0.5, noise_seconds=4e-4, buckets=BUCKETS)
    for link in (SLOW, *LINKS):
        for mode in ("weak", "strong"):
            rows = modelled(model, link, mode, 2).rows
            assert [row[0] for row in rows] == list(SIZES)
            assert all(0 < low <= middle <= high <= 1 for _, low, middle, high in rows)
            middles = [row[2] for row in rows]
            assert middles[0] == pytest.approx(1)
            assert all(later <= before + 1e-9 for before, later in itertools.pairwise(middles)), middles


def test_an_inner_link_helps_only_as_far_as_it_reaches() -> None:
    both = LINKS[-1]
    assert both.inner is not None
    assert all_reduce_seconds(10**8, 8, both) == pytest.approx(all_reduce_seconds(10**8, 8, both.inner), rel=0.01)
    assert all_reduce_seconds(10**8, 16, both) > 1.2 * all_reduce_seconds(10**8, 8, both)
    assert predict(ScalingModel(micro_batch_seconds=1, backward_share=0, noise_seconds=0, buckets=()), 1, both, 1) == 1


def row(mode: str, seconds: float, turn: int = 0, hosts: int = 3, rate: str = "100mbit") -> dict[str, object]:
    named = {"rate": rate, "model": "wide", "communication": mode, "round": turn, "hosts": hosts}
    return {**named, "step_seconds": seconds, "whole_run_step_seconds": 2 * seconds}


def test_rounds_are_compared_with_themselves_and_other_trainings_with_nothing():
    rows = [
        row("allreduce", 8.0), row("fp16", 0.1), row("topk", 2.0), row("topk", 0.5, 1), row("allreduce", 0.5, 1),
        row("allreduce", 100.0, hosts=2), row("topk", 100.0, rate="1gbit"),
    ]  # fmt: skip
    found = against_plain(rows, "100mbit", "wide", "topk_vs{}_here")
    assert found["topk_vs_here"] == pytest.approx(2.0)
    assert found["topk_vs_here_rounds"] == [4.0, 1.0]
    assert found["topk_vs_whole_run_here"] == pytest.approx(2.0)
