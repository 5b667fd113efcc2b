"""The report's figures: what paid time came to, how it scales, and the sentence on top."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.dashboard.job_board import JobBoard
from dtrain_dagster.monitoring.diagnosis import SlowdownCause
from dtrain_dagster.monitoring.windows import windows
from dtrain_dagster.reports.performance import summarise_performance
from tests.dtrain_dagster.simulated_timing import STEPS_PER_WINDOW, Simulation
from tests.dtrain_dagster.told_events import write_run
from trainer.rundir import event


def stay(node: int, started_at: float, ended_at: float) -> NodeUsage:
    return NodeUsage(node_id=node, sku="Standard_NC6s_v3", started_at=started_at, ended_at=ended_at)


def with_steps(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """And the ``step`` event beside each ``timing`` event."""
    steps = [
        event("step", 0, 1, step=item["step"], epoch=0, loss=1.0, learning_rate=1e-3, grad_norm=1.0,
              samples_per_second=sum(item["samples"]) / STEPS_PER_WINDOW / item["seconds"],
              step_seconds=item["seconds"], eta_seconds=0.0) | {"time": item["time"]}
        for item in events
        if item["kind"] == "timing"
    ]  # fmt: skip
    return sorted([*events, *steps], key=lambda item: item["time"])


def whole(events: list[dict[str, Any]], nodes: int) -> list[NodeUsage]:
    """Stays of nodes that are paid for twice as long as they train."""
    timing = windows(events)
    trained = sum(item.total_seconds for item in timing)
    return [stay(10 + node, timing[-1].time - 1.5 * trained, timing[-1].time + 0.5 * trained) for node in range(nodes)]


def test_the_report_of_a_job_with_a_slow_node():
    events = with_steps(Simulation(windows=20, late_compute={1: 0.05}).events())
    usage = whole(events, 3)
    report = summarise_performance(events, 3, usage, {"gradient_accumulation_steps": 2})
    assert report.diagnosis.cause is SlowdownCause.SLOW_COMPUTE
    assert report.verdict.startswith("Slow compute on rank 1 (node 11), ")
    assert report.goodput.share == pytest.approx(0.5, abs=0.02)
    assert report.samples_per_second_per_rank == pytest.approx(report.samples_per_second / 3)
    assert sum(report.segment_shares.values()) == pytest.approx(1)
    assert report.segment_shares["communication"] < 0.05 < report.segment_shares["waiting"]
    assert [rank.node_id for rank in report.ranks] == [10, 11, 12]
    assert report.ranks[1].milliseconds["waiting"] < report.ranks[0].milliseconds["waiting"]
    assert report.recommendations[0].name == "replace node 11"
    again = json.loads(json.dumps(asdict(report), allow_nan=False))
    assert again["diagnosis"]["cause"] == "slow compute"
    assert again["recommendations"][0]["time"] < 0.8


def test_after_a_second_launch_paid_time_still_adds_up():
    """Between the launches nothing was paid for, and the phases are those of the second launch alone."""
    first = Simulation(windows=10).events()
    pause = 10_000.0
    second = [item | {"time": item["time"] + pause, "step": item["step"] + 100, "generation": 2} for item in first]
    trained = first[-1]["time"] - windows(first)[0].time + windows(first)[0].total_seconds
    began, ended = first[-1]["time"] - trained, first[-1]["time"]
    usage = [stay(node, began + at - 10, ended + at) for node in (10, 11, 12) for at in (0.0, pause)]
    report = summarise_performance(with_steps([*first, *second]), 3, usage)
    good = report.goodput
    assert good.trained_node_seconds + sum(good.elsewhere.values()) == pytest.approx(good.paid_node_seconds)
    assert good.share == pytest.approx(trained / (trained + 10), rel=0.01)
    assert good.elsewhere["start-up"] == pytest.approx(60, rel=0.03)


def test_the_pace_of_a_rank_is_that_of_the_world_it_was_in():
    events = with_steps(Simulation(windows=12, noise=0.0, outliers=0.0).events())
    alone = with_steps(Simulation(ranks=1, windows=3, noise=0.0, outliers=0.0).events())
    later = events[-1]["time"] - alone[0]["time"] + 1
    fields = {"lost": [11, 12], "joined": [], "topology": "mesh"}
    lost = event("membership", 0, 2, world_size=1, nodes=[10], **fields) | {"time": events[-1]["time"] + 0.5}
    formed = event("membership", 0, 1, world_size=3, nodes=[10, 11, 12], **fields) | {"time": 0.0}
    both = [formed, *events, lost, *(item | {"time": item["time"] + later, "generation": 2} for item in alone)]
    report = summarise_performance(both, 1, whole(events, 3))
    lone = summarise_performance(alone, 1, whole(alone, 1))
    assert report.samples_per_second_per_rank == pytest.approx(lone.samples_per_second, rel=0.1)


def test_one_throughput_is_that_of_the_job_its_page_and_its_ranks(tmp_path: Path):
    """All samples over the seconds of all steps, however fast the last ones were."""
    slow, quick = (Simulation(windows=count, computing=each).events() for count, each in ((15, 0.1), (5, 0.02)))
    later = slow[-1]["time"] - quick[0]["time"] + 1
    events = with_steps([*slow, *(item | {"time": item["time"] + later} for item in quick)])
    timing = windows(events)
    expected = sum(sum(item.samples) for item in timing) / sum(item.total_seconds for item in timing)
    report = summarise_performance(events, 3, whole(events, 3))
    assert report.samples_per_second == pytest.approx(expected)
    assert sum(rank.samples_per_second or 0.0 for rank in report.ranks) == pytest.approx(expected)
    assert 3 * report.samples_per_second_per_rank == pytest.approx(expected)
    write_run(tmp_path, "done", events, state="succeeded")
    job = JobBoard(str(tmp_path), "dedicated").open("done", time.time())
    assert job is not None
    figures = {item["label"]: item["value"] for item in job.snapshot(0, "", time.time())["headline"]}
    assert figures["samples/s"] == f"{expected:,.0f}"
    bare = [item for item in events if item["kind"] != "timing"]
    told = summarise_performance(bare, 3, whole(events, 3))
    assert told.samples_per_second == pytest.approx(expected, rel=0.05), "the same formula without timing"
    assert (told.segment_shares, told.ranks) == ({}, ())
    with pytest.raises(ValueError, match="no step"):
        summarise_performance([], 1, [])
