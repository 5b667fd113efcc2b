"""A rank that never enters a collective is named, with the line in which it stands, before the timeout."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from thread_worlds import NoTransport

from dtrain_dagster.monitoring.hangs import hang_verdict
from harness.own_models import user_parts
from harness.worlds import Job
from trainer.comm.group import InterruptibleGroup
from trainer.config import DistributedTrainingConfig
from trainer.engine.reports import STACKS_BYTES, Watchdog, limit_seconds, stacks, where_now
from trainer.observability.reporter import Reporter
from trainer.rundir import RunDir


@pytest.mark.parametrize(
    ("given", "usual", "timeout", "limit"),
    [
        (None, None, 60, math.inf),  # the first step may compile the model
        (None, 5.0, math.inf, 100),  # nobody waits for a rank that is alone
        (None, 0.1, 60, 20),
        (None, 1.2, 60, 24),
        (None, 5.0, 60, 35),  # who waits in a collective since about a usual step has half of its timeout left
        (None, 40.0, 60, 70),
        (3.0, 0.1, 60, 3),
        (300.0, 0.1, 60, 30.1),
        (3.0, None, 60, 3),
    ],
)
def test_the_limit_leaves_time_for_the_report(
    given: float | None, usual: float | None, timeout: float, limit: float
) -> None:  # fmt: skip
    assert limit_seconds(given, usual, timeout) == pytest.approx(limit)


@pytest.mark.slow
def test_a_rank_that_blocks_in_the_users_code_is_named_with_its_line(new_job: Callable[..., Job]) -> None:
    job = new_job(hang_seconds=1.0, collective_timeout_seconds=20)
    job.sections["model"] = {"factory": "user_parts:Blocks"}

    def reports() -> list[dict[str, Any]]:
        return [item for item in job.events("hang") if item["step"] == 4]  # a busy machine may be late before

    job.start(2).signal_when(lambda: len(reports()) == 2)
    assert not job.events("communication_error"), "before the timeout"
    source = Path(user_parts.__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "here it stands" in text)
    said = hang_verdict(reports())
    assert said.startswith("rank 1 (node 0) never entered the all-reduce of gradient bucket 0 of step 4"), said
    assert f"it is in user_parts.py:{line} Blocks.forward; rank 0 has been waiting there for" in said
    waits, blocks = sorted(reports(), key=lambda item: item["rank"])
    assert (waits["sequence"], blocks["operation"]) == (blocks["sequence"] + 1, "no collective")
    assert waits["recent"][-1] == {"sequence": waits["sequence"], "what": waits["operation"], "ended": False}
    assert "Blocks.forward" in job.log(1), "the node's log has it too"
    assert "thread communication:" in waits["stacks"]


class _Watched:
    """A watchdog with short limits, over a group of one that the test can block."""

    def __init__(self, folder: Path, **training: Any) -> None:
        self.rundir = RunDir(str(folder))
        self.reporter = Reporter(self.rundir, 0, 1, [])
        self.group = InterruptibleGroup(0, 1, NoTransport)  # type: ignore[arg-type]
        self.dog = Watchdog(DistributedTrainingConfig(**training))
        self.dog.attend(self.reporter, self.group, [0], 0)

    def block(self, what: str, seconds: float) -> None:
        self.group.run(what, lambda transport: time.sleep(seconds))

    def end(self) -> list[dict[str, Any]]:
        self.dog.stop()
        self.group.close()
        self.reporter.close()
        return list(self.rundir.events("hang"))


def test_one_report_per_hang_and_another_only_after_progress(tmp_path: Path) -> None:
    watched = _Watched(tmp_path, hang_seconds=0.1)
    watched.dog.progress(5)
    time.sleep(0.5)
    watched.dog.progress(6)
    time.sleep(0.3)
    assert [item["step"] for item in watched.end()] == [6, 7], "the one that does not end"


def test_outside_of_steps_only_who_waits_in_a_collective_for_long_reports(tmp_path: Path) -> None:
    watched = _Watched(tmp_path, hang_seconds=0.1, collective_timeout_seconds=1.0)
    watched.dog.progress(5)
    watched.dog.rest()  # an evaluation, a dataset, baselines
    time.sleep(0.5)
    watched.block("barrier", 0.9)  # as long as one works alone
    watched.block("all-reduce", 0.2)
    watched.block("all-reduce", 0.9)
    [report] = watched.end()
    assert (report["step"], report["operation"], report["sequence"]) == (5, "all-reduce", 3)


def test_a_first_step_that_takes_long_is_no_hang_but_for_who_waits_in_it(tmp_path: Path) -> None:
    watched = _Watched(tmp_path, collective_timeout_seconds=0.4)
    watched.dog.progress(0)
    time.sleep(0.5)
    watched.block("all-reduce", 0.5)
    [report] = watched.end()
    assert (report["step"], report["operation"]) == (1, "all-reduce")


def test_stacks_are_bounded_and_begin_with_the_main_thread() -> None:
    def deeper(levels: int) -> tuple[str, str]:
        if levels:
            return deeper(levels - 1)
        with ThreadPoolExecutor(1) as other:
            return other.submit(stacks).result(), other.submit(where_now).result()

    text, where = deeper(300)
    main, *rest = text.split("thread ")[1:]
    assert main.startswith("MainThread:")
    assert "deeper" in main
    assert "threading.py" in main or "concurrent" in main, "the innermost lines are kept"
    assert all("stacks" not in item for item in rest), "but for the one that looks"
    assert len(text.encode()) <= STACKS_BYTES
    assert "deeper" in where
