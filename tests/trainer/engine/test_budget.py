"""The hard budget: what counts as paid, and real trainings that come to its end, wherever they are."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.waiting import until
from harness.worlds import Job
from trainer.checkpoint.manager import LATEST
from trainer.documents.presences import NodePresence
from trainer.engine.budget import (
    LATEST_SECONDS,
    SOONEST_SECONDS,
    Budget,
    Paid,
    end_at_budget,
    seconds_to_next_look,
    sum_paid,
)
from trainer.engine.trainer import DistributedTrainer
from trainer.exit_codes import BUDGET
from trainer.rundir import LIMIT, RunDir
from trainer.runtime.launch import Launch

NewJob = Callable[..., Job]


def stay(launch: int, began: float, ended: float | None, seen: float | None, node: int = 0) -> NodePresence:
    return NodePresence(node_id=node, launch=launch, started_at=began, ended_at=ended, last_seen_at=seen)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([], Paid(0.0, 0)),
        ([stay(1, 100, None, 199)], Paid(100.0, 1)),
        ([stay(1, 100, None, None)], Paid(0.0, 0)),  # never heard of since, too long ago
        ([stay(1, 195, None, None)], Paid(5.0, 1)),
        ([stay(1, 100, 150, 150), stay(2, 160, None, 198)], Paid(90.0, 1)),  # an earlier launch is paid for as well
        ([stay(1, 100, None, 140), stay(2, 160, None, 198)], Paid(80.0, 1)),  # whose end nobody wrote
        ([stay(2, 100, None, 120), stay(2, 130, None, 199)], Paid(90.0, 1)),  # a lost node and what took its place
        ([stay(2, 100, None, 199, node) for node in range(3)], Paid(300.0, 3)),
        ([stay(2, 205, None, 206)], Paid(1.0, 1)),  # clocks of nodes differ
    ],
)
def test_what_was_paid(nodes: list[NodePresence], expected: Paid) -> None:
    launch = max((node.launch for node in nodes), default=1)
    assert sum_paid(nodes, launch, now=200.0, stale=10.0) == expected


@given(st.lists(st.tuples(st.integers(1, 3), st.floats(0, 1e9), st.floats(-10, 1e6), st.booleans()), max_size=8))
def test_every_stay_adds_and_time_never_takes_away(stays: list[tuple[int, float, float, bool]]) -> None:
    nodes = [stay(launch, began, began + took if ends else None, began + took) for launch, began, took, ends in stays]
    totals = [sum_paid(nodes[:count], 3, now=5e8, stale=10.0) for count in range(len(nodes) + 1)]
    assert all(a.node_seconds <= b.node_seconds for a, b in itertools.pairwise(totals))
    assert (
        sum_paid(nodes, 3, now=5e8 + 60, stale=1e12).node_seconds
        >= sum_paid(nodes, 3, now=5e8, stale=1e12).node_seconds
    )
    assert totals[-1].after(-5.0) == totals[-1].node_seconds


@given(st.floats(-10, 1e9), st.integers(0, 500))
def test_it_looks_seldom_far_from_the_end_and_often_near_it(left: float, nodes: int) -> None:
    seconds = seconds_to_next_look(left, nodes)
    assert SOONEST_SECONDS <= seconds <= LATEST_SECONDS
    assert seconds == SOONEST_SECONDS or seconds * nodes <= left / 4 * 1.0001


@pytest.mark.parametrize("damage", [b"{", b"[1]", b"{}", b'{"max_node_seconds": -1}', b'{"max_node_seconds": "9"}'])
def test_a_budget_is_raised_and_lowered_while_the_job_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    monkeypatch.setattr("trainer.engine.budget.LATEST_SECONDS", 0.01)
    rundir, ended = RunDir(str(tmp_path)), threading.Event()
    rundir.write_json(LIMIT, {"max_node_seconds": 1e9})
    budget = Budget(rundir, 1e-9, 1, 1, lambda _: ended.set())
    until(lambda: budget.limit == 1e9)
    rundir.storage.write(LIMIT, damage)
    until(lambda: "cannot be read" in caplog.text)
    assert (budget.limit, ended.is_set()) == (1e9, False), "what was read last still holds"
    rundir.write_json(LIMIT, {"max_node_seconds": None})
    until(lambda: budget.limit == math.inf)
    rundir.write_json(LIMIT, {"max_node_seconds": 1e-9})
    assert ended.wait(20)


def test_it_looks_once_more_before_it_is_due(tmp_path: Path) -> None:
    rundir = RunDir(str(tmp_path))
    budget = Budget(rundir, 1e6, 1, 1, lambda _: None)
    assert budget.is_due(1e6)
    rundir.write_json(LIMIT, {"max_node_seconds": 1e7})
    assert not budget.is_due(1e6)
    budget.close()


@pytest.mark.slow
@pytest.mark.parametrize("regroup", [False, True])
def test_a_job_that_is_done_cannot_run_out_of_budget(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch, regroup: bool
) -> None:
    """On a cluster, its budget is spent while it closes: that comes too late, and does nothing."""
    close, before, exits = DistributedTrainer.close, threading.enumerate(), []

    def closes_late(trainer: DistributedTrainer, tracking_seconds: float = 60.0) -> None:
        until(lambda: not {thread.name for thread in threading.enumerate() if thread not in before} & {"budget"})
        end_at_budget(trainer.participant.budget, trainer.rundir, trainer.launch, trainer.steps_done)
        close(trainer, tracking_seconds)

    monkeypatch.setattr(DistributedTrainer, "close", closes_late)
    monkeypatch.setattr(os, "_exit", exits.append)
    job = new_job(environment=Launch(is_elastic=True).variables(), max_node_seconds=1e9, max_steps=2, regroup=regroup)
    assert job.run_here() == 0
    assert not exits
    assert (job.result()["status"], job.result()["launch"]) == ("succeeded", 1 if regroup else None)


@pytest.mark.slow
def test_it_saves_and_stops_and_a_raised_budget_goes_on_to_the_same_weights(new_job: NewJob) -> None:
    settings = {"max_steps": 14, "checkpoint_frequency": 1000, "schedule": "constant"}
    slow = '[{"kind": "sleep", "at": "input", "node": 0, "every": true, "seconds": 0.8}]'
    whole = new_job("whole", **settings)
    assert whole.run() == [0], whole.log()
    job = new_job("cut", environment={"DTRAIN_FAULTS": slow}, max_node_seconds=9, **settings)
    assert job.run() == [BUDGET], job.log()
    stopped = job.result()
    assert (stopped["status"], stopped["launch"]) == ("budget", None)
    assert 0 < stopped["steps"] < 14
    assert "training.max_node_seconds = 9" in stopped["error"]
    assert (job.rundir.read_json(LATEST) or {})["step"] == stopped["steps"]
    assert [item["status"] for item in job.events("end")] == ["budget"]

    job.environment.pop("DTRAIN_FAULTS")
    job.training.pop("max_node_seconds")
    assert job.run() == [0], job.log()
    assert [item["step"] for item in job.events("step")] == list(range(1, 15)), "no step was lost or done twice"
    assert job.result()["weights_sha256"] == whole.result()["weights_sha256"]


@pytest.mark.slow
def test_in_the_middle_of_an_evaluation_it_saves_what_was_trained(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock alone is replaced: it comes to the end at the eleventh look, the first one after ten steps."""
    looks = itertools.count(1)
    monkeypatch.setattr(Budget, "is_due", lambda *_: next(looks) == 11)
    job = new_job(max_node_seconds=1e9, max_steps=12, eval_frequency=10, checkpoint_frequency=1000)
    assert job.run_here() == BUDGET
    assert job.result()["steps"] == 10
    assert not job.events("evaluation")
    assert (job.rundir.read_json(LATEST) or {})["step"] == 10
    assert job.run_here("--set", "training.max_node_seconds=null") == 0
    assert [item["step"] for item in job.events("evaluation")] == [10, 12], "what was broken off is made up for"


@pytest.mark.slow
def test_a_start_that_eats_it_all_ends_where_it_stands(new_job: NewJob) -> None:
    job = new_job(max_node_seconds=1.5)
    job.sections["model"] = {"factory": "user_parts:slow_to_make"}
    assert job.run() == [BUDGET], job.log()
    assert job.result()["status"] == "budget"
    assert "before the first step" in job.result()["error"]
    assert job.result()["error"] in job.log()
