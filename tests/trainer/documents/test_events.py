"""Each kind of event is read by its type, from rows of this and of older versions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trainer.documents.events import (
    CheckpointEvent,
    EventError,
    MembershipEvent,
    StepEvent,
    TimingEvent,
    read_event,
    read_events,
)
from trainer.rundir import event


def step(number: int, **more: Any) -> dict[str, Any]:
    return event("step", 0, 1, step=number, epoch=0, loss=2.0, **more)


def test_a_row_becomes_its_event_and_fields_of_a_newer_version_are_left_out() -> None:
    row = event("membership", 0, 3, nodes=[0, 2], lost=[1], joined=[], world_size=2, topology="star", step=7, new=1)
    found = read_event(MembershipEvent, row)
    assert (found.generation, found.nodes, found.lost, found.world_size, found.step) == (3, [0, 2], [1], 2, 7)
    assert found.has_parameter_server
    assert dataclasses.asdict(found)["time"] == row["time"]


def test_what_an_older_version_did_not_write_has_its_default() -> None:
    found = read_event(CheckpointEvent, {"kind": "checkpoint", "time": 100.0, "seconds": None})
    assert (found.rank, found.seconds, found.stall_seconds, found.began_at) == (0, 0.0, None, 100.0)
    assert read_event(CheckpointEvent, {"kind": "checkpoint", "time": 100.0, "seconds": 4.0}).began_at == 96.0


@pytest.mark.parametrize(
    "row", [{"kind": "step", "time": 1.0}, {"kind": "step", "step": 3}, {"kind": "end", "time": 1.0}]
)
def test_a_row_of_another_kind_or_without_what_all_have_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(EventError, match="step"):
        read_event(StepEvent, row)


def test_among_rows_those_of_the_kind_are_read_in_order_and_damaged_ones_left_out() -> None:
    rows = [step(2), event("end", 0, 1, status="succeeded"), {"kind": "step", "time": 1.0}, step(1)]
    assert [item.step for item in read_events(StepEvent, rows)] == [2, 1]


def timing(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "step": 30, "steps": 10, "seconds": 0.4, "nodes": [0, 0, 3], "samples": [640, 640, 320],
        "segments": {"forward": [0.1, 0.1, 0.1], "communication": [0.02] * 3, "waiting": [0.0, 0.04, 0.05]},
        "typical": {"late": [0.05, 0.01, 0.0]}, "micro_batches": 6,
        "collectives": [
            {"name": "bucket 0", "bytes": 1000, "wire_seconds": 0.02, "waiting_seconds": [0.05, 0.01, 0.0],
             "overlapped_seconds": [0.012] * 3, "bandwidth_bytes_per_second": 66_667},
        ],
    }  # fmt: skip
    return event("timing", 0, 2, **fields) | changes


def test_a_window_has_figures_of_each_rank_and_its_step_is_what_they_sum_to() -> None:
    found = read_event(TimingEvent, timing())
    assert (found.generation, found.step, found.steps, found.nodes, found.samples) == (
        2,
        30,
        10,
        (0, 0, 3),
        (640, 640, 320),
    )
    assert found.world_size == 3
    assert found.seconds == pytest.approx(0.12 + 0.03), "its segments', not the wall clock's: shares add up"
    assert found.total_seconds == pytest.approx(1.5)
    assert found.mean("waiting") == pytest.approx(0.03)
    assert found.mean("forward", "waiting", "input") == pytest.approx(0.13), "what was not measured counts as nothing"
    [bucket] = found.collectives
    assert (bucket.name, bucket.bytes, bucket.wire_seconds, bucket.bandwidth_bytes_per_second) == (
        "bucket 0", 1000, 0.02, 66_667,
    )  # fmt: skip
    assert bucket.overlap == pytest.approx(0.036 / 0.12)
    assert found.facts["micro_batches"] == 6


def test_a_window_of_a_trainer_that_times_no_segments_has_the_wall_clock() -> None:
    bare = timing(segments=None, typical=None, samples=None, collectives=None)
    found = read_event(TimingEvent, bare)
    assert (found.seconds, found.segments, found.collectives, found.mean("forward")) == (0.4, {}, (), 0.0)
    half = timing(segments={"forward": [0.1, 0.1, 0.1], "input": [0.1]})
    assert set(read_event(TimingEvent, half).segments) == {"forward"}, "not a figure for each rank"


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": None}, {"nodes": []}, {"nodes": ["a"]}, {"steps": 0}, {"steps": float("inf")}, {"time": "noon"},
        {"segments": {"forward": [float("nan")] * 3}}, {"segments": {"forward": [0.0] * 3}}, {"segments": [1]},
        {"segments": {"forward": 3}}, {"segments": None, "seconds": None}, {"collectives": ["bucket"]},
        {"collectives": [{"bytes": "many"}]},
    ],
)  # fmt: skip
def test_a_window_that_is_damaged_is_refused_as_one_and_takes_no_other_with_it(change: dict[str, Any]) -> None:
    with pytest.raises(EventError, match="timing"):
        read_event(TimingEvent, timing(**change))
    assert [item.step for item in read_events(TimingEvent, [timing(**change), timing(step=40)])] == [40]
