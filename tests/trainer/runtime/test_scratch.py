"""Folders of checks: whose maker was killed goes with the next check, everything else stays."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from harness.waiting import until
from trainer.runtime.scratch import LOCK, scratch_folder

STRANGER = 12_345
CHECK = """
import sys
from pathlib import Path
import numpy as np
from trainer.isolation.runner import Isolated
Isolated(folder=Path(sys.argv[1]), seconds=60, threads=1).predict(np.zeros((1, 1, 1), dtype=np.float32))
"""
LIVES = """
import sys
from trainer.runtime.scratch import scratch_folder
with scratch_folder('model'):
    sys.stdin.readline()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def waited_for(folder: Path, pattern: str) -> Path:
    until(lambda: list(folder.glob(pattern)), lambda: f"there is no {pattern}")
    return next(folder.glob(pattern))


def runs_model(check: psutil.Process) -> bool:
    """Whether the child of a check has come to the program that loads a model: from then on it ends with its parent."""
    programs = []
    for child in check.children():
        with suppress(psutil.Error, IndexError):  # it is gone, or has no command line yet
            programs.append(Path(child.cmdline()[2]).name)
    return programs == ["child.py"]


def test_what_a_killed_check_left_goes_with_the_next_one(temporary: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "photo").touch()
    killed = subprocess.Popen([sys.executable, "-c", CHECK, str(tmp_path)], start_new_session=True)
    left = waited_for(temporary, "dtrain-isolated-*/files/order.json").parents[1]
    until(lambda: runs_model(psutil.Process(killed.pid)))  # until then, the child holds its parent's lock, too
    killed.kill()
    killed.wait()
    (left / "aside").symlink_to(canary)
    living = subprocess.Popen([sys.executable, "-c", LIVES], stdin=subprocess.PIPE)
    try:
        lives = waited_for(temporary, f"dtrain-model-*/{LOCK}").parent
        with scratch_folder("model") as own:
            assert own.parent.stat().st_mode & 0o777 == own.stat().st_mode & 0o777 == 0o700
            assert not list(own.iterdir())
            assert not left.exists()
            assert lives.exists()
            with scratch_folder("model") as other:
                assert own.exists()
                assert other != own
        assert sorted(temporary.iterdir()) == [lives]
        assert (canary / "photo").exists()
    finally:
        living.communicate(b"\n", timeout=30)
    assert not list(temporary.iterdir())


def test_what_is_not_ours_stays(temporary: Path, tmp_path: Path) -> None:
    for name in ("dtrain-mine", "dtrain-open", "dtrain-stranger", "dtrain-linked", "mine"):
        (temporary / name).mkdir(mode=0o700)
        (temporary / name / "photo").touch()
    for name in ("dtrain-open", "dtrain-stranger", "mine"):
        (temporary / name / LOCK).touch()
    (temporary / "dtrain-open").chmod(0o755)
    (tmp_path / LOCK).touch()
    (temporary / "dtrain-linked" / LOCK).symlink_to(tmp_path / LOCK)
    tmp_path.chmod(0o700)
    (temporary / "dtrain-link").symlink_to(tmp_path)
    (temporary / "dtrain-file").touch()
    if os.geteuid() == 0:
        os.chown(temporary / "dtrain-stranger", STRANGER, STRANGER)
    else:
        (temporary / "dtrain-stranger" / LOCK).unlink()
    before = sorted(temporary.rglob("*"))
    with scratch_folder("model"):
        pass
    assert sorted(temporary.rglob("*")) == before
