"""Work that is done in a fork of this process, and killed by ``kill -9`` just before one of its steps.

A step changes something in a folder: a file, or rows of a database. Imports are done before, so a kill costs little.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = {
    "open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.symlink", "shutil.rmtree",
}  # fmt: skip
"""Events of the interpreter (`sys.addaudithook`) that count as steps."""
PATIENCE_SECONDS = 120.0
"""Within which a fork does its work."""


def in_fork(work: Callable[[], Any], folder: Path, kill_at: int | None = None) -> tuple[Any, int]:
    """Return what the work gives and how many steps in the folder it took; (None, 0) if it was killed at one of them.
    Raise RuntimeError with its stack trace if it fails.

    A fork of a process with threads may inherit a lock that nobody is left to release. One that hangs is aborted, so
    that `faulthandler`, which pytest has enabled, prints where.
    """
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.close(reader)
        try:
            count = _count_steps(str(folder), kill_at)
            said = json.dumps({"gave": work(), "steps": count()})
        except BaseException:
            said = json.dumps({"error": traceback.format_exc()})
        os.write(writer, said.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        if not select.select([file], [], [], PATIENCE_SECONDS)[0]:
            os.kill(child, signal.SIGABRT)
            os.waitpid(child, 0)
            raise RuntimeError(f"the fork said nothing for {PATIENCE_SECONDS:g} s; its stacks are on standard error")
        found = json.loads(file.read() or '{"gave": null, "steps": 0}')
    _, status = os.waitpid(child, 0)
    if "error" in found:
        raise RuntimeError(found["error"])
    assert os.waitstatus_to_exitcode(status) == (0 if found["steps"] else -signal.SIGKILL)
    return found["gave"], found["steps"]


def _count_steps(folder: str, last: int | None) -> Callable[[], int]:
    """Count the steps of this process from now on, and kill it at the last one."""
    count, changed = 1, set[Any]()

    def step() -> None:
        nonlocal count
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        reads = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if event in STEPS and not reads and folder in str(arguments[0]):
            step()

    def before(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.lstrip()[:6].upper() in ("INSERT", "UPDATE", "DELETE"):
            changed.add(connection)
            step()

    def commit(connection: Any) -> None:
        if connection in changed:
            changed.discard(connection)
            step()

    sys.addaudithook(audit)
    if "sqlalchemy" in sys.modules:
        from sqlalchemy import event
        from sqlalchemy.engine import Engine

        event.listen(Engine, "before_cursor_execute", before)
        event.listen(Engine, "commit", commit)
    return lambda: count
