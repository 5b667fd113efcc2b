"""The benchmark's side of a framework: processes that are stopped except in their turns."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.frameworks.protocol import ADDRESS, Case, Failed
from benchmarks.host import free_port, lockstep

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 120.0
"""Seconds that a framework has to start, to be ready, or to end an interval."""


class FrameworkProcessError(RuntimeError):
    """A framework failed, ended, or does not answer. The message says why, as far as its answer or its log does."""


class Measurement(NamedTuple):
    """Measured times of an interval of steps of one framework."""

    steps: int
    seconds: float
    """Seconds from when the first rank began until the last one was done."""
    cpu_seconds: float
    """CPU seconds of all its processes."""
    lockstep_seconds: float
    """Seconds if each step had ended on all ranks when it ended on the last of them."""


@dataclass
class FrameworkProcess:
    """The processes of one framework."""

    name: str
    folder: Path
    ranks: int
    processes: list[subprocess.Popen[bytes]]
    connections: list[Connection]
    case: Case | None = None
    began: int = 0
    """Number of cases that it has begun."""
    is_broken: bool = False
    """True if it ended or does not answer: it is not used again."""

    def begin(self, case: Case) -> None:
        """Prepare a case, and return when all ranks stand before the first step; raise `FrameworkProcessError` if one
        fails."""
        self.began += 1
        folder = self.folder / f"case-{self.began}"
        folder.mkdir()
        self.case = replace(case, folder=str(folder), port=free_port())
        with self._awake():
            self._tell(self.case)
            self._hear()

    def measure(self, steps: int) -> Measurement:
        """Let all ranks take ``steps`` steps, while no other framework works, and return the times."""
        before = self._cpu_seconds()
        with self._awake():
            self._tell(steps)
            times = self._hear()
        seconds = max(rank[-1] for rank in times) - min(rank[0] for rank in times)
        each = [[end - begin for begin, end in pairwise(rank)] for rank in times]
        return Measurement(steps, seconds, self._cpu_seconds() - before, lockstep(each))

    def end(self) -> None:
        """Leave the case."""
        self.case = None
        with self._awake():
            self._tell(0)
            self._hear()

    def close(self) -> None:
        """End all its processes."""
        tree = self._tree()
        with contextlib.suppress(FrameworkProcessError):
            self._signal(signal.SIGCONT)
            if self.case is None:
                self._tell(None)
        _, alive = psutil.wait_procs(tree, timeout=10 if self.case is None and not self.is_broken else 0)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=10)
        for child in self.processes:
            child.wait()

    def _tell(self, what: Any) -> None:
        if self.is_broken:
            raise FrameworkProcessError(f"{self.name} is not there any more: {self.log()}")
        try:
            for connection in self.connections:
                connection.send(what)
        except OSError:
            self.is_broken = True
            raise FrameworkProcessError(f"{self.name} ended: {self.log()}") from None

    def _hear(self) -> list[Any]:
        answers = [self._answer(connection) for connection in self.connections]
        failed = [answer for answer in answers if isinstance(answer, Failed)]
        if failed:
            self.case = None  # all ranks have left it
            raise FrameworkProcessError(f"{self.name} failed: {failed[0]}")
        return answers

    def _answer(self, connection: Connection) -> Any:
        try:
            if connection.poll(PATIENCE_SECONDS):
                return connection.recv()
        except (EOFError, OSError):
            self.is_broken = True
            raise FrameworkProcessError(f"{self.name} ended: {self.log()}") from None
        self.is_broken = True
        raise FrameworkProcessError(f"{self.name} has not answered for {PATIENCE_SECONDS:g} s: {self.log()}")

    def log(self) -> str:
        """Return the last lines of its logs, in one line."""
        lines = [line for path in sorted(self.folder.glob("log-*.txt")) for line in path.read_text().splitlines()]
        return " | ".join(line.strip() for line in lines[-6:])[-600:]

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _tree(self) -> list[psutil.Process]:
        """Return its processes and all that they have started."""
        found = []
        for child in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(child.pid)
                found += [process, *process.children(recursive=True)]
        return found

    def _cpu_seconds(self) -> float:
        """Return the CPU seconds of all its processes so far, with those that have ended if their parent has waited for
        them."""
        total = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total


def start(names: Sequence[str], ranks: int, folder: Path) -> tuple[list[FrameworkProcess], dict[str, str]]:
    """Start frameworks; return those that wait for their first case, and the reasons why others do not."""
    frameworks = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "turns"))
        server.listen(64)
        server.settimeout(0.5)
        try:
            for name in names:
                frameworks.append(_start(name, ranks, folder))
            _let_come(server, {framework.name: framework for framework in frameworks})
        except BaseException:
            for framework in frameworks:
                framework.close()
            raise
    failed = {}
    for framework in [*frameworks]:
        if len(framework.connections) < ranks:
            failed[framework.name] = f"it did not start: {framework.log()}"
            frameworks.remove(framework)
            framework.close()
    return frameworks, failed


def _start(name: str, ranks: int, folder: Path) -> FrameworkProcess:
    (folder / name).mkdir()
    port, processes = free_port(), []
    for rank in range(1 if name == "ray" else ranks):  # Ray starts its own ranks
        environment = {
            **os.environ,
            ADDRESS: str(folder / "turns"),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "DTRAIN_CACHE": str(folder / "cache"),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
        }
        with (folder / name / f"log-{rank}.txt").open("wb") as log:
            command = [sys.executable, "-m", "benchmarks.frameworks", name]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder))
    return FrameworkProcess(name, folder / name, ranks, processes, [])


def _let_come(server: socket.socket, frameworks: dict[str, FrameworkProcess]) -> None:
    """Accept the connections of all ranks, until all have connected that still can."""
    come: dict[str, dict[int, Connection]] = {name: {} for name in frameworks}
    until = time.monotonic() + PATIENCE_SECONDS
    awaited = set(frameworks)
    while awaited and time.monotonic() < until:
        try:
            connection = Connection(server.accept()[0].detach())
        except TimeoutError:
            awaited = {name for name in awaited if all(child.poll() is None for child in frameworks[name].processes)}
            continue
        name, rank = connection.recv()
        come[name][rank] = connection
        framework = frameworks[name]
        framework.connections = [come[name][rank] for rank in sorted(come[name])]
        if len(framework.connections) == framework.ranks:
            awaited.discard(name)
