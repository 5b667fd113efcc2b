"""Starts a node's processes and answers for them: nothing of a node outlives its guard, however the emulator ends.

Run as a script, with a session of its own. Its standard input gives one line of JSON (``processes``: a list of
``command``, ``environment``, ``folder``, ``output``), then one word a line: ``term`` or ``kill``, to all processes of
the node. The end of the input means that the emulator is gone: kill. Its standard output gives one line of JSON for
each process that ends (``index``, ``code``). Orphans among the descendants come to the guard (PR_SET_CHILD_SUBREAPER),
so that no process gets out of sight by leaving its group.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from trainer.node.processes import descendants, kill_all, signal_all

PR_SET_CHILD_SUBREAPER = 36
KILL_SECONDS = 10.0


def main() -> int:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # The whole group gets SIGTERM; the guard stays to see how it ends.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ended_reader, ended_writer = os.pipe()
    os.set_blocking(ended_writer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ended_writer, warn_on_full_buffer=False)
    buffer = b""
    while b"\n" not in buffer:
        if not (read := os.read(0, 65536)):
            return 0
        buffer += read
    first, _, buffer = buffer.partition(b"\n")
    # All are kept: a Popen that is let go asks for its child's end itself, and nobody else would learn of it.
    started = [_start(spec) for spec in json.loads(first)["processes"]]
    waiting = {process.pid: index for index, process in enumerate(started)}
    while waiting:
        for pid, code in _ended():
            if pid in waiting:
                _tell({"index": waiting.pop(pid), "code": code})
        if not waiting:
            break
        ready, _, _ = select.select([0, ended_reader], [], [])
        if ended_reader in ready:
            os.read(ended_reader, 4096)
        if 0 in ready:
            if not (read := os.read(0, 65536)):
                break
            buffer += read
            *words, buffer = buffer.split(b"\n")
            for word in words:
                if word == b"kill":
                    kill_all(_all, KILL_SECONDS)
                elif word == b"term":
                    signal_all(_all(), signal.SIGTERM)
    kill_all(_all, KILL_SECONDS)
    return 0


def _all() -> set[int]:
    return descendants(os.getpid(), "")


def _start(spec: dict[str, Any]) -> subprocess.Popen[bytes]:
    """What the guard ignores, it must not."""
    with open(spec["output"], "ab") as output:
        return subprocess.Popen(
            spec["command"],
            cwd=spec["folder"],
            env=spec["environment"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_as_usual,
        )


def _as_usual() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def _ended() -> list[tuple[int, int]]:
    """Processes that have ended, with their exit codes; negative for a signal."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((found[0], os.waitstatus_to_exitcode(found[1])))
    return ended


def _tell(line: dict[str, int]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
