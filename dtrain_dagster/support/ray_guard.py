"""The guard of a Ray that was started here: once its starter has ended, in whatever way, nothing of it is left.

``python -m dtrain_dagster.support.ray_guard MARK FOLDER…`` waits for the end of its input, kills every process of the
Ray in the first folder, and removes the folders. Ray's own processes end with their starter but for its agents, which
take minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from trainer.node.processes import kill_all

MARK = "DRAY_SESSION"
"""The environment variable that all processes of a Ray inherit."""
KILL_SECONDS, END_SECONDS = 20.0, 30.0


@contextmanager
def guarded(mark: str, folders: Sequence[Path]) -> Iterator[None]:
    """Have a guard watch this process; at the end it has killed what is left of the Ray in the first
    folder, and removed the folders."""
    command = [sys.executable, "-m", "dtrain_dagster.support.ray_guard", mark, *map(str, folders)]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        try:
            guard.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()


def find_left(mark: str, folder: Path) -> set[int]:
    """Return the processes that inherited the mark, and Ray's own that have files open below the folder: they write
    their titles over what they inherited. This process and its parent are left out."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.pid in (os.getpid(), os.getppid()) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            is_ours = process.environ().get(MARK) == mark or (
                process.name().startswith("ray::") and _has_open(process.pid, folder)
            )
        except psutil.Error:
            continue
        if is_ours:
            found.add(process.pid)
    return found


def _has_open(pid: int, folder: Path) -> bool:
    for entry in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            if os.readlink(entry).startswith(f"{folder}/"):
                return True
    return False


def main(mark: str, folders: Sequence[str]) -> int:
    """Wait for the end of the input, then clear up; return 1 where a process could not be killed."""
    sys.stdin.buffer.read()
    is_clear = kill_all(lambda: find_left(mark, Path(folders[0])), KILL_SECONDS)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return int(not is_clear)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
