"""What a training has in this process: complete where it is made, and nothing left open where it cannot be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from worlds import Job

from trainer.config import ConfigError, parse_job
from trainer.engine.reports import RankReports
from trainer.run import DistributedTrainer
from trainer.rundir import RunDir


def test_a_participant_that_cannot_be_made_leaves_no_thread_behind(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    before = set(threading.enumerate())
    trainer = DistributedTrainer(parse_job(new_job(backend="nccl").write().read_text()))
    with pytest.raises(ConfigError, match="nccl"):
        trainer.initialize_distributed()
    with pytest.raises(RuntimeError, match=r"initialize_distributed\(\) first"):
        _ = trainer.participant
    until = time.monotonic() + 10
    while set(threading.enumerate()) - before:
        assert time.monotonic() < until, threading.enumerate()
        time.sleep(0.01)
    assert (trainer.launch, trainer.steps_done) == (None, 0)
    trainer.close()


def test_phases_before_the_first_world_are_kept_and_other_events_are_dropped(new_job: Callable[..., Job]) -> None:
    job = parse_job(new_job().write().read_text())
    reports = RankReports(job, RunDir(job.run_dir))
    reports.emit("error", message="nobody is there to report as", fatal=False)
    time.sleep(0.01)
    reports.end_phase("startup")
    assert reports.seconds["startup"] > 0
    reports.close(1.0)
    assert list(RunDir(job.run_dir).events()) == []
