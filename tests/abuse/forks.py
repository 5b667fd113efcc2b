"""Kill real processes at chosen moments, without the cost of their imports.

A server process, which is this module run as a program, imports everything once. It forks for each piece of work, and
kills the fork with ``kill -9``, at a moment or just before a step of it. A step changes something: a file in the work's
folder, or a database. Random moments hit the parts that take long; steps hit the points where something is half done.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
STEPS = {
    "open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.symlink", "shutil.rmtree",
}  # fmt: skip
"""Events of the interpreter (`sys.addaudithook`) that count as steps."""
ORPHAN_SECONDS = 20.0
"""Seconds that processes started by a killed fork may go on: they must first notice that no process waits for them."""
_SUBREAPER = 36


class Forks:
    """Runs ``module.NAME(**arguments)`` in forks of a process in which ``module.warm()`` was called."""

    def __init__(self, module: str) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - for as long as the process lives
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.abuse.forks", module],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()
        self._server.communicate()
        self._said.close()

    def run(
        self, name: str, folder: Path, seconds: float | None = None, step: int | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Run a function of the module in a fork, and kill the fork after ``seconds`` or just before step ``step``.

        Return ``code`` of the fork, negative for a signal; ``seconds`` that it took; ``steps`` that it did, if it was
        not killed; the result of the function (``gave``) or its traceback (``error``); and ``orphans``: command lines
        of processes that it had started and that did not end after it. Raise RuntimeError if the server process has
        ended.
        """
        order = {"name": name, "folder": str(folder), "seconds": seconds, "step": step, "arguments": arguments}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        said = self._server.stdout.readline()
        if not said:
            self._said.seek(0)
            raise RuntimeError(f"no process forks any more: {self._said.read()[-2000:]}")
        found: dict[str, Any] = json.loads(said)
        return found


def work(function: Callable[..., Any], order: dict[str, Any]) -> dict[str, Any]:
    """Call the function in the fork, count its steps, and kill the fork just before the step that the order names."""
    count, folder, last, changed = 0, order["folder"], order["step"], set[Any]()

    def step() -> None:
        nonlocal count
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)

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
    try:
        return {"gave": function(Path(folder), **order["arguments"]), "steps": count}
    except Exception:
        return {"error": traceback.format_exc()[-1500:]}


def carry_out(function: Callable[..., Any], order: dict[str, Any]) -> dict[str, Any]:
    """Carry out an order in the server process: fork, kill the fork in time, and return the answer of `Forks.run`."""
    reader, writer = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # lines on the server's stdout are answers
        scratch = Path(order["folder"]).parent / "tmp"
        scratch.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = str(scratch)
        found = work(function, order)
        os.write(writer, json.dumps(found).encode()[:60_000])
        os._exit(1 if "error" in found else 0)
    os.close(writer)
    until = None if order["seconds"] is None else began + order["seconds"]
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if until is not None and time.monotonic() >= until:
            os.kill(pid, signal.SIGKILL)  # no other process has this id before the child was waited for
            until = None
        time.sleep(0.002)
    seconds = time.monotonic() - began
    with os.fdopen(reader, "rb") as file:
        said = file.read()
    return {
        "code": os.waitstatus_to_exitcode(ended[1]), "seconds": seconds, "orphans": outlive(),
        **(json.loads(said) if said else {}),
    }  # fmt: skip


def outlive() -> list[str]:
    """Return the command lines of processes that a killed fork had started and that still run, and kill them. They are
    children of this process now, where the kernel supports it."""
    until = time.monotonic() + ORPHAN_SECONDS
    while True:
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                return []
        if time.monotonic() > until:
            break
        time.sleep(0.005)
    left = []
    for name in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        left.append(Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        os.kill(int(name), signal.SIGKILL)
        os.waitpid(int(name), 0)
    return left


def main(name: str) -> None:
    """Serve orders from stdin, one line of JSON each, with functions of the module of this name."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    module = importlib.import_module(name)
    module.warm()
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(carry_out(getattr(module, order["name"]), order)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
