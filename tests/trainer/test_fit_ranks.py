"""`fit` in worlds of real processes: whatever their number, and whichever are killed, the weights are the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from fit_jobs import Scripts

from harness.worlds import assert_same_training
from trainer.exit_codes import EVICTED
from trainer.rundir import RunDir

pytestmark = pytest.mark.slow
Begin = Callable[..., Scripts]
KILLED = -signal.SIGKILL
STEPS = 9


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Makes launches of a script; none of their processes outlives the test."""
    made: list[Scripts] = []

    def make(name: str) -> Scripts:
        made.append(Scripts(tmp_path / name))
        return made[-1]

    yield make
    for scripts in made:
        scripts.kill()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    """The training that nothing disturbed, in a world of one."""
    scripts = Scripts(tmp_path_factory.mktemp("whole") / "run").start()
    assert scripts.wait() == [0], scripts.log()
    assert scripts.result()["steps"] == STEPS
    return scripts


def logged(scripts: Scripts, name: str) -> list[float]:
    """A figure that a callback has logged."""
    found = [item["figures"] for item in RunDir(str(scripts.run_dir)).events("figures")]
    return [figures[name] for figures in found if name in figures]


def assert_same(one: Scripts, whole: Scripts) -> None:
    """Weights and samples, the best by a measure of the whole split, and the state of a callback are the same."""
    assert_same_training(one, whole)
    assert one.result()["best_score"] == whole.result()["best_score"]
    averages = [logged(each, "average")[-1] for each in (one, whole)]
    assert averages[0] == pytest.approx(averages[1], rel=1e-5)


def test_worlds_of_any_size_train_the_same_with_and_without_workers(begin: Begin, whole: Scripts) -> None:
    """Each sample is read with noise, which is the same whichever rank and whichever worker reads it."""
    pair, three = begin("pair").start(2, workers=1), begin("three").start(3)
    assert pair.wait() == [0, 0], pair.log()
    assert three.wait() == [0, 0, 0], three.log()
    assert_same(pair, whole)
    assert_same(three, whole)
    assert pair.result()["world_size"] == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_resumed_after_a_kill_equals_bit_for_bit(begin: Begin, whole: Scripts, workers: int) -> None:
    scripts = begin("run")
    fault = {"kind": "kill", "at": "forward", "step": 7, "node": 0}
    assert scripts.start(faults=(fault,), workers=workers).wait() == [KILLED], scripts.log()
    assert scripts.start(workers=workers).wait() == [0], scripts.log()
    assert scripts.result()["weights_sha256"] == whole.result()["weights_sha256"]
    assert_same(scripts, whole)


def test_sigterm_to_a_rank_and_its_workers_ends_with_a_checkpoint(begin: Begin, whole: Scripts) -> None:
    stop = {"kind": "stop", "at": "forward", "step": 4, "node": 0}  # so that it does not end before it is asked to
    scripts = begin("run").start(faults=(stop,), workers=2)
    rank = psutil.Process(scripts.processes[0].pid)
    scripts.until(lambda: rank.status() == psutil.STATUS_STOPPED)
    for number in (signal.SIGTERM, signal.SIGCONT):
        os.killpg(rank.pid, number)
    assert scripts.wait() == [EVICTED], scripts.log()
    assert scripts.result()["status"] == "stopped"
    assert scripts.start(workers=2).wait() == [0], scripts.log()
    assert scripts.result()["weights_sha256"] == whole.result()["weights_sha256"]


def test_a_rank_alone_is_killed_and_its_workers_hold_nobody_up(begin: Begin) -> None:
    """A worker inherits its rank's connections. This one never ends by itself: peers would wait for them."""
    scripts = begin("run").start(2, data="hanging", workers=1, collective_timeout_seconds=300)
    told = scripts.run_dir.parent / "worker"
    scripts.until(lambda: told.exists() and told.read_text())
    worker, rank = psutil.Process(int(told.read_text())), scripts.processes[1]
    assert worker.ppid() == rank.pid
    time.sleep(1.0)  # until rank 0 waits for it in the sum of a step
    scripts.signal(signal.SIGKILL, 1)
    assert scripts.wait(120) == [1, KILLED], scripts.log()
    assert "TrainingFailedError" in scripts.log()
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_a_node_is_killed_and_the_others_go_on(begin: Begin, whole: Scripts) -> None:
    fault = {"kind": "kill", "at": "backward", "step": 4, "node": 1}
    scripts = begin("run").start(3, faults=(fault,), launch=True, workers=1)
    assert scripts.wait() == [0, KILLED, 0], scripts.log()
    assert_same(scripts, whole)
    assert logged(scripts, "ranks") == [3, 2]
    assert scripts.result()["world_size"] == 2


def test_ranks_with_other_data_are_refused_with_both_names(begin: Begin) -> None:
    scripts = begin("run").start(2, data="own")
    assert scripts.wait() == [1, 1]
    log = scripts.log()
    assert log.count("rank 1 trains on tensordataset-") >= 2, log
    assert "and rank 0 on tensordataset-" in log
