"""The jobs that a command started or followed, noted for `dtrain_dagster work`, which runs that command and is asked
about them after Ctrl-C.

It makes the file and names it in the environment; the processes below it add to it. What became of a job is
in its run directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

WORK_FILE = "DTRAIN_WORK_FILE"
"""Variable: the file to which a process adds the jobs that it starts or follows; unset outside of `dtrain_dagster
work`."""


@contextmanager
def work_file() -> Iterator[Path]:
    """Yield a file for the jobs of one command, and name it in the environment for processes that begin meanwhile."""
    before = os.environ.get(WORK_FILE)
    with TemporaryDirectory(prefix="dtrain-work-") as folder:
        path = Path(folder) / "jobs"
        os.environ[WORK_FILE] = str(path)
        try:
            yield path
        finally:
            os.environ.pop(WORK_FILE)
            if before is not None:
                os.environ[WORK_FILE] = before


def note_job(job_id: str) -> None:
    """Note that this process started a job, or follows it. Nothing is noted outside of `dtrain_dagster work`, or where
    the file is gone: what is told after Ctrl-C must not hinder the job."""
    if path := os.environ.get(WORK_FILE):
        _note(path, job_id)


@cache
def _note(path: str, job_id: str) -> None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # each line is one write
        try:
            os.write(descriptor, f"{job_id}\n".encode())
        finally:
            os.close(descriptor)


def noted_jobs(path: Path) -> list[str]:
    """Return the jobs that were noted in a file, each once, in the order in which they were begun."""
    with suppress(FileNotFoundError):
        return list(dict.fromkeys(path.read_text().split()))
    return []
