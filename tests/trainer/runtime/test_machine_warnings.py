"""A machine that will be taken away says so: what is read of Azure's Scheduled Events, and when a node leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from typing import Any

import pytest

from harness.metadata_service import MetadataService, metadata_service
from harness.waiting import until
from harness.worlds import Job
from trainer.config import parse_job
from trainer.engine.interruptions import Stopped
from trainer.engine.trainer import DistributedTrainer
from trainer.runtime import machine_warnings as warnings
from trainer.runtime.launch import Launch
from trainer.runtime.machine_warnings import (
    LEAVE_SECONDS,
    NodeWarning,
    ScheduledEvents,
    begin_watch,
    find_service,
    keep_time,
    read_events,
)

NOW = 1_800_000_000.0


def event(kind: str = "Preempt", ahead: float = 30.0, **fields: Any) -> dict[str, Any]:
    return {
        "EventId": "E1", "EventType": kind, "Resources": ["vm_1"], "EventStatus": "Scheduled", "Description": "",
        "NotBefore": formatdate(NOW + ahead, usegmt=True), **fields,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("events", "seconds"),
    [
        ([event()], 30 - LEAVE_SECONDS),
        ([event("Redeploy", 600)], 600 - LEAVE_SECONDS),
        ([event("Terminate", 4)], 0.0),
        ([event(NotBefore="")], 0.0),
        ([event(EventStatus="Started", NotBefore="")], 0.0),
        ([event("Redeploy", 600), event("Preempt", 20)], 10.0),
        ([event("Freeze")], None),
        ([event(Resources=["vm_2"])], None),
        ([event(EventStatus="Completed")], None),
        ([], None),
    ],
    ids=["spot", "redeploy", "at once", "no time", "begun", "the first", "freeze", "of others", "over", "nothing"],
)
def test_an_event_tells_when_its_machine_leaves(events: list[dict[str, Any]], seconds: float | None) -> None:
    found = read_events({"Events": events}, "vm_1", NOW)
    assert (found and found.leaves_at - NOW) == seconds
    assert read_events({"Events": events}, "vm_9", NOW) is None


@pytest.mark.parametrize("odd", [[], "nothing", {}, {"Events": []}])
def test_what_is_no_list_of_events_warns_of_nothing(odd: Any) -> None:
    assert read_events(odd, "vm_1", NOW) is None


def test_a_warning_keeps_its_time_and_is_withdrawn() -> None:
    first, begun, other = NodeWarning("a", 5.0), NodeWarning("a", 9.0), NodeWarning("b", 9.0)
    assert keep_time(first, begun) == first
    assert keep_time(first, other) == other
    assert keep_time(first, None) is None
    assert keep_time(None, begun) == begun


def test_only_azures_machines_ask_unless_an_address_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    chassis = tmp_path / "chassis"
    monkeypatch.setattr(warnings, "_CHASSIS", str(chassis))
    assert find_service({}) is None
    chassis.write_text("another\n")
    assert find_service({}) is None
    chassis.write_text("7783-7084-3265-9085-8269-3286-77\n")
    assert find_service({}) == warnings.AZURE
    assert find_service({warnings.URL: "off"}) is None
    assert find_service({warnings.URL: "http://127.0.0.1:1/"}) == "http://127.0.0.1:1"


@pytest.fixture
def service() -> Iterator[MetadataService]:
    with metadata_service() as made:
        yield made


def test_the_service_is_asked_in_its_own_words_and_never_through_a_proxy(
    service: MetadataService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    events = ScheduledEvents(f"{service.url}/vm_1")
    assert events.look(time.time()) is None
    service.announce("vm_1", seconds=40.0)
    found = events.look(now := time.time())
    assert found is not None
    assert 28.0 < found.leaves_at - now <= 30.0
    assert ScheduledEvents(f"{service.url}/vm_2").look(now) is None
    service.is_down = True
    with pytest.raises(OSError, match="503"):
        events.look(now)


def test_a_watch_hears_of_warnings_and_of_their_end_and_outlives_a_silence(service: MetadataService) -> None:
    watch = begin_watch({warnings.URL: f"{service.url}/vm_1"}, time.time, 0.01)
    assert watch is not None
    until(lambda: len(service.asked) > 2, "a look")
    event_id = service.announce("vm_1", "Redeploy", 600.0)
    until(lambda: watch.warning, "the warning")
    service.is_down = True
    count = len(service.asked)
    until(lambda: len(service.asked) > count + 5, "looks in vain")
    assert watch.warning is not None
    assert watch.warning.why == "Redeploy: Redeploy-0"
    service.is_down = False
    service.withdraw(event_id)
    until(lambda: watch.warning is None, "the withdrawal")
    watch.every_seconds = 3600.0  # it looks for as long as its process lives


def test_a_service_that_never_answers_is_not_asked_for_ever(service: MetadataService) -> None:
    service.is_down = True
    assert begin_watch({warnings.URL: f"{service.url}/vm_1"}, time.time, 0.01)
    until(lambda: len(service.asked) == warnings._AGAIN, "the tries")
    time.sleep(0.1)
    assert len(service.asked) == warnings._AGAIN
    assert begin_watch({warnings.URL: "off"}, time.time) is None


def test_a_node_that_nobody_else_watches_saves_a_checkpoint_and_leaves(
    service: MetadataService, new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(world_size=1, gradient_accumulation_steps=1, max_steps=10_000, checkpoint_frequency=1_000_000)
    for name, value in (
        ("DTRAIN_CACHE", job.environment["DTRAIN_CACHE"]), *Launch(records_presence=True).variables().items(),
        (warnings.URL, f"{service.url}/vm_1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    service.announce("vm_1", status="Started")
    trainer = DistributedTrainer(parse_job(job.write().read_text()))
    trainer.initialize_distributed()
    try:
        trainer.setup()
        with pytest.raises(Stopped) as stopped:
            trainer.train()
    finally:
        trainer.close()
    assert stopped.value.everybody
    latest = job.rundir.latest_checkpoint()
    assert latest is not None
    assert latest[1] == trainer.steps_done < 10_000
