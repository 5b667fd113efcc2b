"""A node at work: its processes under their guard, and the environment that Azure ML sets for them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.azure.emulator.played import Played

GUARD = Path(__file__).with_name("guard.py")


class Guarded:
    """Processes under a guard; all end with the emulator."""

    def __init__(self, processes: list[dict[str, Any]]) -> None:
        self.codes: dict[int, int] = {}
        """Exit code by process, of those that have ended."""
        self.count = len(processes)
        self._rest = b""
        self._kill_at: float | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(GUARD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._say(json.dumps({"processes": processes}))

    @property
    def pid(self) -> int:
        return self._process.pid

    def gone(self) -> bool:
        """Has everything ended? Also lets a grace that is over end in SIGKILL."""
        self._listen()
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at = None
            self._say("kill")
        if self._process.poll() is None:
            return False
        self._listen()
        for index in range(self.count):  # the guard was killed: so is what it had
            self.codes.setdefault(index, -9)
        return True

    def end(self, grace_seconds: float) -> None:
        """SIGTERM now, SIGKILL after the grace (of the real clock); 0: SIGKILL now. Does not wait."""
        if grace_seconds > 0:
            self._say("term")
            self._kill_at = self._kill_at or time.monotonic() + grace_seconds
        else:
            self._say("kill")

    def close(self) -> None:
        """Kill what is left, and wait for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while read := os.read(self._process.stdout.fileno(), 65536):
                *lines, self._rest = (self._rest + read).split(b"\n")
                for line in lines:
                    told = json.loads(line)
                    self.codes[told["index"]] = told["code"]


@dataclass(slots=True, kw_only=True)
class Slot:
    """One of a job's nodes, by rank: whichever machine it is just now."""

    rank: int
    node: str | None = None
    work: Guarded | Played | None = None
    lost_at: float | None = None
    back_after: float | None = None
    """Seconds after which another machine takes its place; None: never."""
    stay: int = 0

    @property
    def lost(self) -> bool:
        return self.lost_at is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many processes, on how many nodes. ``ranked``: they are told their ranks (PyTorch)."""

    nodes: int
    per_node: int
    ranked: bool

    @property
    def world(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What the machine image and the service give every process, beside its rank."""

    path: str
    ca: Path
    resolver: Path
    service: dict[str, str]
    """AZUREML_*, MLFLOW_*, MSI_*: the service's own variables."""
    extra: Callable[[], dict[str, str]] = field(default=dict)


def node_environment(image: Image, shape: Shape, node: int, local: int, port: int, home: Path) -> dict[str, str]:
    """Of one process. The image of the emulated nodes is this Python environment, which trusts the emulator's CA and
    resolves ``*.localhost``; nothing of the emulator's own environment gets through."""
    variables = {
        "PATH": image.path,
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "REQUESTS_CA_BUNDLE": str(image.ca),
        "SSL_CERT_FILE": str(image.ca),
        "NO_PROXY": "127.0.0.1,localhost,.localhost",
        "PYTHONPATH": str(image.resolver),
        **image.service,
        "AZUREML_NODE_COUNT": str(shape.nodes),
        "AZ_BATCH_NODE_ID": f"node-{node}",
    }
    if shape.ranked:
        variables |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(shape.world),
            "RANK": str(node * shape.per_node + local),
            "LOCAL_RANK": str(local),
            "NODE_RANK": str(node),
        }
    return variables


def log_name(shape: Shape, rank: int) -> str:
    return f"user_logs/std_log_process_{rank:02d}.txt" if shape.ranked else "user_logs/std_log.txt"
