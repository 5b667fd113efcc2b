"""The binding of ranks to cores, and the scheduling of the threads of communication.

On a host whose ranks take all of its cores, a rank waits for its peers on several threads that wake each other, and
each wake-up may end on the core of another rank, behind its computation. Then a sum of a few kilobytes takes as long as
a time slice of the scheduler, not as long as the network: `benchmarks.scaling`. On two quiet cores, binding gains
nothing that can be measured (1.00, quartiles 0.94 and 1.06, `benchmarks.cpu_parts`)."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

AVAILABLE: Sequence[int] = (
    sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
)
"""Cores that this process may use, before any of its threads is bound to some of them."""
TURN_SECONDS = 0.05
"""Least seconds that a rank computes on its cores before the ranks of a host exchange them. A move takes 0.1 ms."""
_TASKS = Path("/proc/self/task")
_MEMORY_NODES = Path("/sys/devices/system/node")
_bound: set[int] | None = None
"""The cores that `bind` has bound threads of this process to; None if it has not."""


def share_of(place: int, ranks: int, threads: int, cores: Sequence[int]) -> Sequence[int]:
    """Return the cores of the rank at ``place`` of ``ranks`` on this host: its own ones where the ranks, with
    ``threads`` each, take all cores; else all, since the scheduler places threads better where some cores are idle."""
    if ranks == 1 or ranks * threads != len(cores):
        return cores
    return cores[place * threads : (place + 1) * threads]


@dataclass(frozen=True, slots=True)
class CoreTurns:
    """The cores of the ranks of one host, which exchange them in turns, at the same steps.

    One virtual core is often slower than its neighbour for minutes, by up to a seventh, since it shares a real one with
    another machine. A rank that stays on it looks like a slow node, and is none. Cores that change hands leave slow
    only what is slow by itself.
    """

    shares: tuple[tuple[int, ...], ...]
    """The cores of each place on this host."""
    place: int
    """That of this process at first."""

    def take_turn(self, step: int, step_seconds: float) -> None:
        """Bind this process to the cores of its turn. ``step`` and ``step_seconds`` must be the same on all ranks."""
        bind(self.cores_at(step, step_seconds))

    def cores_at(self, step: int, step_seconds: float) -> tuple[int, ...]:
        """Return the cores of this process after so many steps, each of so many seconds."""
        turn = step // max(1, math.ceil(TURN_SECONDS / step_seconds))
        return self.shares[(self.place + turn) % len(self.shares)]


def take_cores(place: int, ranks: int, threads: int) -> CoreTurns | None:
    """Bind this process to the cores of the rank at ``place`` of ``ranks`` on this host, see `share_of`. Return the
    turns in which they exchange them; None where all use all cores, or where memory is nearer to some cores. A place
    outside the ranks binds nothing: a launcher may tell a rank its place, and not among how many."""
    if place >= ranks:
        return None
    shares = tuple(tuple(share_of(other, ranks, threads, AVAILABLE)) for other in range(ranks))
    bind(shares[place])
    if len(set(shares)) < ranks or ranks == 1 or len([*_MEMORY_NODES.glob("node[0-9]*")]) > 1:
        return None
    return CoreTurns(shares, place)


def bind(cores: Sequence[int]) -> None:
    """Bind this thread, the threads that it will start, and those that an earlier call has bound, to these cores, where
    the system allows it. Nothing happens where no thread is bound and these are all cores."""
    global _bound
    if _bound == set(cores):
        return
    if not hasattr(os, "sched_setaffinity") or (_bound is None and set(cores) == set(AVAILABLE)):
        return
    threads = [0]
    if _bound is not None:
        with contextlib.suppress(OSError):
            threads += [int(task.name) for task in _TASKS.iterdir() if _cores_of(int(task.name)) == _bound]
    for thread in threads:
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            os.sched_setaffinity(thread, cores)
    _bound = set(cores) if set(cores) != set(AVAILABLE) else None


def roam() -> None:
    """Let this thread, which works beside the training, use all cores, although its parent is bound."""
    if _bound is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, AVAILABLE)


def _cores_of(thread: int) -> set[int] | None:
    try:
        return os.sched_getaffinity(thread)
    except OSError:
        return None


def yield_to_senders() -> None:
    """Keep gloo's receiving threads in this process from preempting the thread that runs on their core.

    An answer wakes such a thread while another of our threads may still hold the lock of that connection, in the middle
    of sending. Gloo then tries the lock over and over, for as long as the scheduler lets it: on one core, that is a
    whole time slice in which the lock cannot be released. Threads of the batch class do not preempt.
    """
    for thread in _TASKS.glob("*"):  # empty except on Linux
        with contextlib.suppress(OSError):  # the thread has ended, or the system forbids it
            if (thread / "comm").read_text().strip() == "gloo_tcp_loop":
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
