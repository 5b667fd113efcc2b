"""One incarnation of a node on this machine: a process group with a log, from its start until none of it is left."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from dtrain_dagster.clusters.exit_policy import NodeFacts
from dtrain_dagster.clusters.local.line_log import LineLog
from dtrain_dagster.clusters.local.processes import group_alive, group_of, marked, signal_all, signal_group
from trainer.rundir import NodePresence

_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


class Process(Protocol):
    """The interface that a node needs of a process; `subprocess.Popen` has it."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        ...

    def wait(self) -> int:
        """Wait for the process and return its exit code."""
        ...


@dataclass(slots=True)
class Node:
    """A node that the supervisor starts, watches and ends."""

    presence: NodePresence
    log: LineLog
    mark: str
    """The mark that its processes inherit, see `dtrain_dagster.clusters.local.processes.MARK`."""
    size: int
    """Number of processes that it is to have."""
    processes: list[tuple[int, Process]] = field(default_factory=list)
    """(rank, process), in order; the first process leads the group."""
    group: int | None = None
    gone_at: float | None = None
    """Time of `time.monotonic` at which nothing of the node was left, children of its processes included."""
    _kill_at: float | None = None

    @property
    def alive(self) -> bool:
        """Return whether a process of the node runs."""
        return any(process.poll() is None for _, process in self.processes)

    @property
    def gone(self) -> bool:
        """Return whether nothing of the node is left."""
        return self.gone_at is not None

    @property
    def codes(self) -> tuple[int | None, ...]:
        """Return the exit codes as `NodeFacts.codes`; a process that could not be started counts as killed."""
        started = tuple(process.poll() for _, process in self.processes)
        return started + (-signal.SIGKILL,) * (self.size - len(started))

    def facts(self) -> NodeFacts:
        """Return what `clusters.exit_policy` decides from."""
        since = None if self.gone_at is None else time.monotonic() - self.gone_at
        return NodeFacts(node_id=self.presence.node_id, codes=self.codes, gone_seconds=since)

    def end(self, grace: float) -> None:
        """Send SIGTERM to the whole node now, and SIGKILL after ``grace`` seconds, in `look`. A second call can only
        shorten the grace."""
        if self.gone:
            return
        if self._kill_at is None:
            self._signal(signal.SIGTERM)
        self._kill_at = min(time.monotonic() + grace, self._kill_at or float("inf"))

    def kill(self) -> None:
        """Send SIGKILL to the whole node now: it does not answer to anything else."""
        self._kill_at = time.monotonic()
        self._signal(signal.SIGKILL)

    def look(self) -> bool:
        """Continue to end the node, if that was begun. Return True once, when nothing of it is left."""
        if self.gone or self.alive or self._left():
            if not self.gone and self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._signal(signal.SIGKILL)
            return False
        self.gone_at = time.monotonic()
        self.log.close()
        return True

    def _left(self) -> bool:
        """Return whether a child of its processes is left, in its group or elsewhere."""
        return self.group is not None and (group_alive(self.group) or bool(marked(self.mark)))

    def _signal(self, number: int) -> None:
        if self.group is None:
            return
        if group_alive(self.group):
            signal_group(self.group, number)
        signal_all((pid for pid in marked(self.mark) if group_of(pid) != self.group), number)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, however that happens; where it can."""
    if _libc is None:
        return
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)  # it died before the kernel was asked
