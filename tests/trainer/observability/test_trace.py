"""Traces of a window that the configuration chooses, and of those that are asked for while training runs (T5)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.waiting import until
from trainer.config import DistributedTrainingConfig
from trainer.observability import trace as profiling
from trainer.observability.reporter import Reporter
from trainer.observability.trace import StepProfiler, TraceRequest
from trainer.rundir import PROFILE_REQUEST, RunDir


class Rank:
    """Steps of some arithmetic, traced as a rank of a training is."""

    def __init__(self, rundir: RunDir, rank: int = 0, **training: Any) -> None:
        self.rundir, self.reporter = rundir, Reporter(rundir, rank, 1, [])
        config = DistributedTrainingConfig(**training)
        self.done = 0
        self.profiler = StepProfiler(config, rundir, self.reporter, torch.device("cpu"), 0)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
            self.done += 1
            self.profiler.step(self.done)

    def train_until(self, true: Callable[[], bool]) -> None:
        until(lambda: true() or self.train(1))

    def end(self) -> None:
        self.profiler.close(self.done)
        self.reporter.close()

    def traces(self) -> list[str]:
        return [name for name in self.rundir.storage.list("profile") if name.startswith("trace")]


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    monkeypatch.setattr(profiling, "LOOK_SECONDS", 0.02)
    return RunDir(str(tmp_path))


def multiplications(rundir: RunDir, trace: str) -> int:
    events = json.loads(rundir.storage.read(f"profile/{trace}"))["traceEvents"]
    return sum(event.get("name") == "aten::mm" for event in events)


def test_a_window_of_the_configuration_and_one_for_each_request(rundir: RunDir) -> None:
    rank = Rank(rundir, profile_steps=2, profile_from_step=3)
    rank.train(6)
    rank.train_until(lambda: bool(rank.traces()))
    assert rank.traces() == ["trace-r00000-s000005.json"]
    assert multiplications(rundir, rank.traces()[0]) == 2, "steps 4 and 5 and no other"

    rundir.storage.write(PROFILE_REQUEST, b"")
    rank.train_until(lambda: len(rank.traces()) == 2)
    assert multiplications(rundir, rank.traces()[1]) == 5, "an empty file means five steps of rank 0"
    rundir.request_trace(steps=3, ranks=[0, 7])
    rank.train_until(lambda: len(rank.traces()) == 3)
    assert multiplications(rundir, rank.traces()[2]) == 3
    rundir.request_trace(ranks=[7])
    rank.train_until(lambda: not rundir.storage.exists(PROFILE_REQUEST))
    rank.train(20)
    assert len(rank.traces()) == 3, "each request is answered once, and only by whom it names"
    rank.end()

    assert not list(rundir.events("error"))
    first, second, third = rundir.events("profile")
    assert (first["step"], first["steps"], first["path"]) == (5, 2, "profile/trace-r00000-s000005.json")
    assert (second["steps"], third["steps"]) == (5, 3)
    by_name = {item["name"]: item for item in first["top"]}
    assert by_name["aten::mm"]["calls"] == 2
    assert 0 < by_name["aten::mm"]["share"] < 1
    shares = [item["share"] for item in first["top"]]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) <= 10


def functions(rundir: RunDir, trace: str) -> set[str]:
    events = json.loads(rundir.storage.read(f"profile/{trace}"))["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "python_function"}


def test_python_functions_are_in_a_trace_unless_nobody_wants_them(rundir: RunDir) -> None:
    rank = Rank(rundir, profile_steps=1)
    rank.train_until(lambda: len(rank.traces()) == 1)
    rundir.request_trace(steps=1, python=False)
    rank.train_until(lambda: len(rank.traces()) == 2)
    rank.end()
    first, second = rank.traces()
    assert any(name.endswith(": train") and "test_trace.py(" in name for name in functions(rundir, first))
    assert multiplications(rundir, first) == 1
    assert functions(rundir, second) == set()
    for event in rundir.events("profile"):
        assert all("(" not in item["name"] and "<" not in item["name"] for item in event["top"]), event["top"]
    alone = Rank(rundir, 1, profile_steps=1, profile_python=False)
    alone.train_until(lambda: len(rank.traces()) == 3)
    alone.end()
    assert functions(rundir, rank.traces()[-1]) == set()


def test_a_request_reaches_ranks_that_did_not_take_it_but_none_that_come_later(rundir: RunDir) -> None:
    ranks = [Rank(rundir, rank) for rank in (0, 1)]
    time.sleep(0.1)
    rundir.request_trace(steps=1, ranks=[1])
    ranks[0].train_until(lambda: not rundir.storage.exists(PROFILE_REQUEST))
    ranks[1].train_until(lambda: bool(ranks[1].traces()))
    late = Rank(rundir, 1)
    time.sleep(0.1)
    late.train(3)
    for rank in (*ranks, late):
        rank.end()
    [event] = rundir.events("profile")
    assert (event["rank"], event["steps"]) == (1, 1)


def test_several_ranks_trace_the_same_steps_once_all_have_had_the_time_to_notice(rundir: RunDir) -> None:
    """Not before steps are done: between two looks without one nobody can tell when all will have noticed."""
    rank = Rank(rundir)
    rundir.request_trace(steps=2, ranks=[0, 1])
    time.sleep(0.2)
    assert rundir.storage.exists(PROFILE_REQUEST)
    rank.train_until(lambda: bool(rank.traces()))
    rank.end()
    assert not rundir.storage.exists(PROFILE_REQUEST)
    agreed = rundir.read_json("profile/request-000001.json") or {}
    [event] = rundir.events("profile")
    assert event["step"] == agreed["from_step"] + 2
    assert agreed["from_step"] > 0


@pytest.mark.parametrize("method", ["start", "stop"])
def test_a_profiler_that_fails_costs_its_trace_and_nothing_else(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    stop = torch.profiler.profile.stop

    def broken(profile: torch.profiler.profile) -> None:
        if method == "stop":
            stop(profile)
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, method, broken)
        rank = Rank(rundir, profile_steps=2)
        rank.train(1)
        rank.profiler.close(rank.done)
        rank.end()
    [error] = rundir.events("error")
    assert (error["fatal"], "INSUFFICIENT_PRIVILEGES" in error["message"]) == (False, True)
    assert not rank.traces()


def test_more_steps_than_a_training_can_bear_are_refused(rundir: RunDir) -> None:
    with pytest.raises(ValueError, match="1 to 50"):
        rundir.request_trace(steps=51)
    with pytest.raises(ValueError, match="profile_steps"):
        DistributedTrainingConfig(profile_steps=51)


def test_where_the_users_own_code_is_tracing_there_is_no_second_trace(rundir: RunDir) -> None:
    with torch.profiler.profile():
        rank = Rank(rundir, profile_steps=1)
        rank.train(3)
    rank.end()
    [error] = rundir.events("error")
    assert "tracing already" in error["message"]
    assert not rank.traces()


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (b"{", "Invalid JSON"),
        (b'{"steps": 51}', "steps = 51: it should be less"),
        (b'{"steps": true, "ranks": "all"}', "ranks = 'all': "),
        (b'{"path": "/etc/passwd"}', "path is not a setting"),
        (b"[" * 9_000, "recursion"),
        (b" " * 20_000, "20,000 bytes"),
        (b"\xff\xfe", "Invalid JSON"),
    ],
)
def test_a_request_that_is_none_is_reported_once_and_harms_nobody(
    rundir: RunDir, request_: bytes, complaint: str
) -> None:  # fmt: skip
    rank = Rank(rundir)
    rundir.storage.write(PROFILE_REQUEST, request_)
    rank.train_until(lambda: not rundir.storage.exists(PROFILE_REQUEST))
    rundir.request_trace(steps=1)
    rank.train_until(lambda: bool(rank.traces()))
    rank.end()
    [error] = rundir.events("error")
    assert error["fatal"] is False
    assert complaint.lower() in error["message"].lower(), error["message"]
    assert len(error["message"]) < 600


def test_a_folder_in_the_place_of_a_request_is_reported_once(rundir: RunDir, tmp_path: Path) -> None:
    (tmp_path / PROFILE_REQUEST).mkdir(parents=True)
    rank = Rank(rundir)
    time.sleep(0.3)
    rank.train(3)
    rank.end()
    assert len(list(rundir.events("error"))) == 1
    assert not rank.traces()


def test_a_step_without_a_trace_lies_between_two(rundir: RunDir) -> None:
    """On a GPU, CUPTI is detached in the step after a trace: a trace that was begun at once saw nothing of the GPU."""
    rank = Rank(rundir, profile_steps=2)
    for _ in range(3):
        rank.profiler.requests.asked.put(TraceRequest(steps=1))
    rank.train_until(lambda: len(rank.traces()) == 4)
    rank.end()
    ends = sorted(event["step"] for event in rundir.events("profile"))
    assert ends[0] == 2
    assert min(later - earlier for earlier, later in pairwise(ends)) >= 2


def test_no_trace_begins_while_another_one_is_written(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then torch crashes where the events of one trace are read while another one ends."""
    written, write = threading.Event(), rundir.storage.write
    monkeypatch.setattr(rundir.storage, "write", lambda *given: written.wait(60) and write(*given))
    rank = Rank(rundir, profile_steps=2)
    rank.profiler.requests.asked.put(TraceRequest(steps=1))
    rank.train(20)
    written.set()
    rank.train_until(lambda: len(rank.traces()) == 2)
    rank.end()
    first, second = sorted(event["step"] for event in rundir.events("profile"))
    assert first == 2
    assert second > 20
