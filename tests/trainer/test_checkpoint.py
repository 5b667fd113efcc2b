from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.checkpoint import BEST, LATEST, CheckpointError, CheckpointManager
from trainer.config import ConfigError
from trainer.rundir import RunDir


def state(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((100,), float(step))}, "progress": {"step": step, "best_loss": float("inf")}}


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return RunDir(str(tmp_path))


def manager(rundir: RunDir, keep: int = 3, fingerprint: str = "this") -> CheckpointManager:
    return CheckpointManager(rundir, keep, fingerprint)


def loaded_step(checkpoints: CheckpointManager) -> int | None:
    found = checkpoints.load_latest()
    return None if found is None else int(found[1]["model"]["weight"][0])


def test_what_is_saved_is_loaded(rundir: RunDir) -> None:
    checkpoints = manager(rundir)
    assert checkpoints.load_latest() is None
    with pytest.raises(CheckpointError, match=r"BEST.json is gone"):
        checkpoints.load_best()
    folder = checkpoints.save(state(7), 7, 1, is_best=True)
    assert folder == "checkpoints/g0001-s000000007"
    for found in (checkpoints.load_latest(), checkpoints.load_best()):
        assert found is not None
        assert found[0] == folder
        assert torch.equal(found[1]["model"]["weight"], torch.full((100,), 7.0))
    assert rundir.read_json(LATEST) == rundir.read_json(BEST) == {"path": folder, "step": 7}


def test_the_newest_are_kept_and_the_best_besides(rundir: RunDir) -> None:
    checkpoints = manager(rundir, keep=2)
    for step in range(1, 7):
        checkpoints.save(state(step), step, 1, is_best=step == 2)
    kept = [int(folder[-9:]) for folder in checkpoints.folders()]
    assert kept == [6, 5, 2]
    assert checkpoints.load_best()[1]["progress"]["step"] == 2


def test_one_step_is_written_once_though_it_is_best_and_regular(rundir: RunDir) -> None:
    checkpoints = manager(rundir)
    folder = checkpoints.save(state(5), 5, 1, is_best=True)
    written = (Path(rundir.uri) / folder / "state.pt").stat().st_mtime_ns
    assert checkpoints.save(state(5), 5, 1) == folder
    assert (Path(rundir.uri) / folder / "state.pt").stat().st_mtime_ns == written
    assert rundir.read_json(BEST) == rundir.read_json(LATEST)


def test_a_later_generation_is_newer_even_at_an_earlier_step(rundir: RunDir) -> None:
    """A start from scratch in a used folder: its checkpoints must neither lose to the old ones nor be pruned first."""
    checkpoints = manager(rundir, keep=2)
    for step in (100, 200, 300):
        checkpoints.save(state(step), step, 1)
    checkpoints.save(state(50), 50, 2)
    assert loaded_step(checkpoints) == 50
    checkpoints.save(state(60), 60, 2)
    assert [folder[-16:] for folder in checkpoints.folders()] == ["g0002-s000000060", "g0002-s000000050"]


def damage(folder: Path, how: str) -> None:
    if how == "a bit":
        data = bytearray((folder / "state.pt").read_bytes())
        data[len(data) // 2] ^= 1
        (folder / "state.pt").write_bytes(data)
    elif how == "cut short":
        (folder / "state.pt").write_bytes((folder / "state.pt").read_bytes()[:-10])
    elif how == "no state":
        (folder / "state.pt").unlink()
    elif how == "no manifest":  # what a process killed while saving leaves
        (folder / "manifest.json").unlink()
    elif how == "manifest cut short":
        (folder / "manifest.json").write_text("{")
    else:
        (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize(
    "how", ["a bit", "cut short", "no state", "no manifest", "manifest cut short", "manifest of something else"]
)
def test_a_damaged_one_is_named_and_the_one_before_is_used(
    rundir: RunDir, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    checkpoints = manager(rundir)
    checkpoints.save(state(1), 1, 1)
    folder = checkpoints.save(state(2), 2, 1, is_best=True)
    damage(Path(rundir.uri) / folder, how)
    with caplog.at_level(logging.WARNING):
        assert loaded_step(checkpoints) == 1
    assert f"{folder} is" in caplog.text
    with pytest.raises(CheckpointError, match=folder):
        checkpoints.load_best()


def test_the_checkpoint_of_another_training_is_refused_with_a_remedy(rundir: RunDir) -> None:
    manager(rundir).save(state(1), 1, 1)
    with pytest.raises(ConfigError, match=r"g0001-s000000001 belongs to another training.*training.resume=false"):
        manager(rundir, fingerprint="other").load_latest()


def test_the_manifest_comes_last(rundir: RunDir) -> None:
    order: list[str] = []
    checkpoints = manager(rundir)
    write = rundir.storage.write

    def note(name: str, data: bytes) -> None:
        order.append(name.rsplit("/", 1)[-1])
        write(name, data)

    checkpoints.storage.write = note  # type: ignore[method-assign]
    checkpoints.save(state(1), 1, 1, is_best=True)
    assert order == ["state.pt", "manifest.json", "LATEST.json", "BEST.json"]


def test_code_hidden_in_a_checkpoint_is_not_run(rundir: RunDir, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    checkpoints = manager(rundir)
    checkpoints.save({"model": Trap()}, 1, 1)
    with pytest.raises(pickle.UnpicklingError):
        checkpoints.load_latest()
    assert not (tmp_path / "sprung").exists()


def test_a_full_disk_leaves_the_last_checkpoint(rundir: RunDir) -> None:
    program = """
import resource, sys, torch
from trainer.checkpoint import CheckpointManager
from trainer.rundir import RunDir
checkpoints = CheckpointManager(RunDir(sys.argv[1]), 3, "this")
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
checkpoints.save({"model": torch.zeros(10_000)}, 2, 1, is_best=True)
"""
    checkpoints = manager(rundir)
    checkpoints.save(state(1), 1, 1)
    run = subprocess.run([sys.executable, "-c", program, rundir.uri], capture_output=True, text=True)
    assert "File too large" in run.stderr
    assert json.loads(rundir.storage.read(LATEST))["step"] == 1
    assert loaded_step(checkpoints) == 1
    checkpoints.save(state(2), 2, 1)
    assert loaded_step(checkpoints) == 2
