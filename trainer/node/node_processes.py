"""One incarnation of a node on this machine: a process group with a log, from its start until none of it is left.

Starting, looking at and ending it belong here; what follows when it has ended does not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from trainer.exit_codes import is_loss
from trainer.node.environment import LaunchError, Seat, merge_environment, node_mark, rank_environment
from trainer.node.line_log import LineLog
from trainer.node.processes import group_alive, group_of, marked, signal_all, signal_group
from trainer.runtime.parent_death import die_with


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


Spawn = Callable[[Sequence[str], Mapping[str, str], int, int | None], Process]
"""Start one process of this command and environment that writes to a pipe, in a process group or, without one, in a
group of its own; it raises OSError where it cannot."""


@dataclass(slots=True)
class NodeProcesses:
    """The processes of one incarnation of a node, which this process starts, watches and ends."""

    seat: Seat
    log: LineLog
    mark: str
    """The mark that its processes inherit, see `trainer.node.processes.MARK`."""
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
        """Return the exit codes by local rank, None for a process that runs; one that could not be started counts as
        killed."""
        started = tuple(process.poll() for _, process in self.processes)
        return started + (-signal.SIGKILL,) * (self.size - len(started))

    @property
    def ended_codes(self) -> tuple[int, ...]:
        """Return the exit codes of the processes that were started and have ended."""
        return tuple(code for _, process in self.processes if (code := process.returncode) is not None)

    @property
    def is_useless(self) -> bool:
        """Return whether no process of it runs, or one that the others need is lost."""
        return not self.alive or any(code is not None and is_loss(code) for code in self.codes)

    def start(self, launch: Mapping[str, Any], variables: Mapping[str, str], spawn: Spawn) -> None:
        """Start its processes, one per rank. ``launch``: as in ``launch.json``. ``variables``: added to each
        environment. Raise `LaunchError` where the command cannot be started, OSError where no process can."""
        for local_rank in range(self.size):
            rank, environment = environment_of(launch, self.seat, local_rank, variables, os.environ)
            pipe = self.log.open_pipe()
            try:
                process = spawn(launch["command"], environment, pipe, self.group)
            except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
                raise LaunchError(
                    f"cannot start {launch['command'][0]!r}: {error.strerror}; give a program that is on the "
                    "PATH, or its path"
                ) from error
            finally:
                os.close(pipe)
            self.processes.append((rank, process))
            self.group = self.group or process.pid

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


def environment_of(
    launch: Mapping[str, Any], seat: Seat, local_rank: int, variables: Mapping[str, str], inherited: Mapping[str, str]
) -> tuple[int, dict[str, str]]:
    """Return the rank of a process of a node, and its environment. ``variables``: besides those of its place;
    ``inherited``: of the process that starts it."""
    place = {**rank_environment(launch, seat, local_rank), **variables}
    return place["RANK"], merge_environment(inherited, launch, seat, place)


def make_node(launch: Mapping[str, Any], seat: Seat, log: LineLog) -> NodeProcesses:
    """Return a node of this launch (as in ``launch.json``) without processes yet."""
    mark = node_mark(launch, seat.node_id, seat.incarnation)
    return NodeProcesses(seat, log, mark, launch["processes_per_node"])


def header_of(launch: Mapping[str, Any], incarnation: int) -> str:
    """Return the line that begins the output of one incarnation in a node's log."""
    which = f"launch {launch['launch']}" + (f", incarnation {incarnation}" if incarnation > 1 else "")
    return f"--- {which}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---"


def spawn_process(command: Sequence[str], environment: Mapping[str, str], pipe: int, group: int | None) -> Process:
    """Start one process that the kernel kills when this one ends, as `Spawn` says."""
    # The thread that starts it is the one whose end the kernel watches, so it must live as long as this process. Python
    # code between fork and exec is safe while no other thread holds a lock that it needs: it only calls prctl.
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        process_group=group or 0,
        preexec_fn=partial(die_with, os.getpid()),
    )
