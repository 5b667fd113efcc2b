"""The lock of one machine: had by one, given back by whoever ends, waited for with patience and not for ever."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.errors import DamagedError
from trainer.runtime.file_lock import hold_lock

HOLDS = """
import sys
from trainer.runtime.file_lock import hold_lock
with hold_lock(sys.argv[1], 0.0) as is_held:
    print(is_held, flush=True)
    sys.stdin.read()
"""


def test_a_lock_is_had_by_one_and_comes_back_from_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"True\n"
        with hold_lock(path, 0.1) as is_held:
            assert not is_held, "it is had by another, who may be frozen"
    finally:
        holder.kill()
        holder.communicate()
    with hold_lock(path, 0.1) as is_held:
        assert is_held
        with hold_lock(path, 0.1) as again:
            assert not again
    with hold_lock(path, 0.0) as is_held:
        assert is_held


def test_something_else_in_place_of_the_lock_is_damage(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folder").mkdir()
    for name in ("link", "folder"):
        with pytest.raises(DamagedError, match="in place of a lock"), hold_lock(tmp_path / name, 1.0):
            pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_nothing_can_be_locked_it_goes_on_without(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, "refused")

    monkeypatch.setattr("fcntl.flock", refuse)
    with caplog.at_level(logging.WARNING), hold_lock(tmp_path / "lock", 1.0) as is_held:
        assert not is_held
    assert "cannot be locked" in caplog.text
