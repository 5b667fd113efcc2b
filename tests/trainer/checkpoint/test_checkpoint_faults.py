"""Checkpoints under what can go wrong: processes that are killed or race, storage that fails, stalls or is full."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from broken_storage import BrokenFileSystem, Checkpoints, loaded_step, stalled, state
from racing_savers import race

import trainer.checkpoint.async_writer
from harness.worlds import Forked, frozen
from trainer.checkpoint.manager import BEST, LATEST, CheckpointManager
from trainer.rundir import RunDir

HERE = Path(__file__).parents[1]


@pytest.mark.slow
def test_killed_before_any_file_operation_of_a_save(tmp_path: Path) -> None:
    with Forked((HERE / "killed_saves.py").read_text(), str(tmp_path / "run")) as process:
        deaths = [json.loads(line) for line in process.communicate().splitlines()]
    assert [death["killed"] for death in deaths] == [True] * (len(deaths) - 1) + [False]
    where = " ".join(death["at"] for death in deaths)
    for place in ("state.pt", "manifest.json", "LATEST.json", "BEST.json", "LATEST.json.lock", "g0001-s000000001"):
        assert place in where, f"no process was killed at {place}"
    assert [death["loaded"] for death in deaths] == [death[LATEST] for death in deaths]
    assert sorted({death[LATEST] for death in deaths}) == sorted({death[BEST] for death in deaths}) == [1, 2]
    assert [death[LATEST] for death in deaths] == sorted(death[LATEST] for death in deaths)
    assert [death["heir"] for death in deaths] == [0] * len(deaths)  # the next generation saves, and cleans up


@pytest.mark.slow
def test_of_two_racing_writers_the_fenced_out_never_wins(tmp_path: Path) -> None:
    """Real processes on one folder, the lock taken from each other all the time."""
    race(str(tmp_path / "run"), saves=40)
    rundir = RunDir(str(tmp_path / "run"))
    assert (rundir.read_json(BEST) or {})["path"] == "checkpoints/g0002-s000000039"
    checkpoints = CheckpointManager(rundir, 3, "this")
    assert [folder[-16:-10] for folder in checkpoints.folders()] == ["g0002-"] * 3
    found = checkpoints.load_latest()
    assert found is not None
    assert found[1]["model"].unique().tolist() == [40.0]


FREEZE = """
import signal, sys, threading, torch
from trainer.checkpoint.manager import CheckpointManager
from trainer.rundir import RunDir
folder, name, suffix = sys.argv[1:]
checkpoints = CheckpointManager(RunDir(folder), 3, "this", lambda kind, **fields: print(kind, fields.get("message")))
checkpoints.save({"model": torch.ones(9)}, 1, 1, is_best=True)
checkpoints.wait()
armed = True
def hook(event, arguments):
    global armed
    if event == "open" and armed and name in str(arguments[0]) and str(arguments[0]).endswith(suffix):
        armed = False
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # of the process, another thread might take it later
sys.addaudithook(hook)
checkpoints.save({"model": torch.ones(9)}, 2, 1, is_best=True)
checkpoints.wait()
"""


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("state.pt", "tmp"),
        ("manifest", "tmp"),
        ("LATEST.json", "json"),  # read within its folder, so without a slash
        ("/LATEST.json.", "tmp"),
        ("/BEST.json.", "tmp"),
    ],
)
def test_a_writer_that_is_frozen_in_a_save_has_lost_when_it_wakes(tmp_path: Path, name: str, suffix: str) -> None:
    """Just before it opens this file: with all that it has read before, which holds no more when it wakes."""
    with frozen(FREEZE, str(tmp_path), name, suffix) as thaw:
        heir = CheckpointManager(RunDir(str(tmp_path)), 3, "this")
        heir.fence(2)
        counted = 2 if name == "/BEST.json." else 1
        assert loaded_path(heir) == f"checkpoints/g0001-s{counted:09d}"
        for step in (2, 3):
            assert heir.save(state(step), step, 2, is_best=step == 2)
            assert heir.wait(60)
        output = thaw()
    assert "checkpoint_failed FencedError: generation 2 writes the checkpoints now" in output.splitlines()[-1]
    assert loaded_path(heir) == "checkpoints/g0002-s000000003"
    assert heir.load_best()[0] == "checkpoints/g0002-s000000002"
    assert heir.save(state(4), 4, 2)
    assert heir.wait(60)
    names = [folder.rsplit("/")[-1] for folder in heir.folders()]
    assert names == ["g0002-s000000004", "g0002-s000000003", "g0002-s000000002"]
    heir.close(10)


def loaded_path(checkpoints: CheckpointManager) -> str | None:
    found = checkpoints.load_latest()
    return found and found[0]


def save(checkpoints: Checkpoints, step: int) -> None:
    assert checkpoints.save(state(step), step, 1)
    assert checkpoints.wait(60)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkpoints]:
    writer = trainer.checkpoint.async_writer
    monkeypatch.setattr(writer, "RETRIES", replace(writer.RETRIES, first_pause_seconds=0.001))
    checkpoints = Checkpoints()
    yield checkpoints
    BrokenFileSystem.failures = 0
    checkpoints.close(10)


@pytest.mark.parametrize("failures", [1, 2, 4])
def test_storage_that_fails_for_a_while_is_tried_again_and_reported(broken: Checkpoints, failures: int) -> None:
    save(broken, 1)
    BrokenFileSystem.failures = failures
    save(broken, 2)
    assert [(item["kind"], item.get("attempt"), item.get("gives_up")) for item in broken.told[1:]] == [
        *(("checkpoint_failed", attempt, False) for attempt in range(1, failures + 1)),
        ("checkpoint", None, None),
    ]
    assert "OSError: no answer about" in broken.told[1]["message"]
    assert loaded_step(broken) == 2


def test_storage_that_fails_for_long_costs_that_checkpoint_only(broken: Checkpoints) -> None:
    save(broken, 1)
    BrokenFileSystem.failures = 1000
    save(broken, 2)
    broken.fence(1)  # no error either
    assert [item.get("gives_up") for item in broken.told[1:]] == [False] * 4 + [True, False]
    assert (loaded_step(broken), broken.committed_step()) == (1, 1)
    BrokenFileSystem.failures = 0
    save(broken, 3)
    assert (loaded_step(broken), broken.committed_step()) == (3, 3)


def test_storage_that_stalls_stops_nobody_and_is_reported(broken: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    with stalled() as reached:
        assert broken.save(state(1), 1, 1)
        assert reached.acquire(timeout=60)  # the writer hangs in its storage from here on
        assert broken.save(state(2), 2, 1)
        assert broken.told == []
        monkeypatch.setattr(trainer.checkpoint.async_writer, "SILENT_SECONDS", 0.0)
        assert not broken.save(state(3), 3, 1)
        assert not broken.save(state(4), 4, 1)
        [report] = broken.told  # once, though asked twice
        assert (report["kind"], report["step"], report["gives_up"]) == ("checkpoint_failed", 1, False)
        assert "still being written after" in report["message"]
        assert not broken.wait(0.01)
    assert broken.wait(60)
    assert [item["step"] for item in broken.told[1:]] == [1, 2]
    assert loaded_step(broken) == 2


def test_a_report_that_fails_does_not_end_the_writer(broken: Checkpoints) -> None:
    def fail(kind: str, **fields: Any) -> None:
        raise ValueError("no room for reports")

    broken._report = fail
    save(broken, 1)
    save(broken, 2)
    assert loaded_step(broken) == 2


def test_the_checkpoints_vanish_while_it_runs(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(RunDir(str(tmp_path / "run")), 3, "this")
    for step in range(1, 21):
        assert checkpoints.save(state(step), step, 1, is_best=step == 5)
        if step % 2:
            shutil.rmtree(tmp_path / "run", ignore_errors=True)  # perhaps in the middle of the save
            checkpoints.wait()
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
        else:
            assert checkpoints.wait(60)
            assert (loaded_step(checkpoints), checkpoints.committed_step()) == (step, step)
    checkpoints.close(10)


LIMITED = """
import dataclasses, json, os, resource, sys, torch
import trainer.checkpoint.async_writer
from trainer.checkpoint.manager import CheckpointManager
from trainer.rundir import RunDir
writer = trainer.checkpoint.async_writer
writer.RETRIES = dataclasses.replace(writer.RETRIES, first_pause_seconds=0.001)
folder, kind, limit = sys.argv[1:]
kind = getattr(resource, kind)
checkpoints = CheckpointManager(RunDir(folder), 3, "this", lambda kind, **fields: print(json.dumps([kind, fields])))
def save(step):
    assert checkpoints.save({"model": {"weight": torch.full((10_000,), float(step))}}, step, 1, is_best=True)
    assert checkpoints.wait(60)
save(1)
old = resource.getrlimit(kind)
resource.setrlimit(kind, (int(limit), old[1]))
save(2)
resource.setrlimit(kind, old)
print(json.dumps(["folders", os.listdir(folder + "/checkpoints")]))
save(3)
"""


@pytest.mark.parametrize(
    ("kind", "limit", "message"),
    [
        ("RLIMIT_FSIZE", 20_000, "File too large"),  # what a full disk does: the write itself fails, half-way
        ("RLIMIT_FSIZE", 50, "File too large"),
        ("RLIMIT_NOFILE", 3, "Too many open files"),
    ],
)
def test_a_full_disk_or_too_many_files_leave_the_last_checkpoint(
    tmp_path: Path, kind: str, limit: int, message: str
) -> None:
    with Forked(LIMITED, str(tmp_path), kind, str(limit)) as process:
        first, *failures, folders, last = [json.loads(line) for line in process.communicate().splitlines()]
    assert (first[0], last[0], last[1]["step"]) == ("checkpoint", "checkpoint", 3)
    assert [(kind, fields["attempt"], fields["gives_up"]) for kind, fields in failures] == [
        ("checkpoint_failed", attempt, attempt == 5) for attempt in range(1, 6)
    ]
    assert all(message in fields["message"] for _, fields in failures)
    assert not [name for name in folders[1] if name.endswith(".tmp")]
    checkpoints = CheckpointManager(RunDir(str(tmp_path)), 3, "this")
    assert loaded_step(checkpoints) == 3
    assert [folder[-9:] for folder in checkpoints.folders()] == ["000000003", "000000001"]
