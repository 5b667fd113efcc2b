"""Each kind of event is read by its type, from rows of this and of older versions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trainer.documents import events, schemas
from trainer.documents.events import CheckpointEvent, EventError, MembershipEvent, StepEvent, read_event, read_events
from trainer.rundir import event

KINDS = {kind.kind: kind for kind in events.Event.__subclasses__()}


def step(number: int, **more: Any) -> dict[str, Any]:
    return event("step", 0, 1, step=number, epoch=0, loss=2.0, **more)


def test_every_kind_has_a_type_and_no_field_that_the_reader_of_files_does_not_know() -> None:
    assert set(schemas.EVENTS) - set(KINDS) == {"timing", "hang", "profile", "tune"}
    assert set(KINDS) <= set(schemas.EVENTS)


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
