"""Which cores a rank computes on, and when the threads of its communication get them.

On a host whose ranks take all of its cores, a rank waits for its peers on several threads that wake each other, and
each wake-up may end on the core of another rank, behind its computation. Then a sum of a few kilobytes takes as long as
a time slice of the scheduler, not as long as the network: `benchmarks.scaling`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

AVAILABLE: Sequence[int] = (
    sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
)
"""Cores that this process may use, before any of its threads is bound to some of them."""
_TASKS = Path("/proc/self/task")
_bound: set[int] | None = None
"""What `bind` has bound threads of this process to, if it has."""


def share_of(place: int, ranks: int, threads: int, cores: Sequence[int]) -> Sequence[int]:
    """The cores of the rank at ``place`` of so many on this host: its own ones where ranks with so many threads each
    take all of them; else all, for where some are idle the scheduler knows better."""
    if ranks == 1 or ranks * threads != len(cores):
        return cores
    return cores[place * threads : (place + 1) * threads]


def bind(cores: Sequence[int]) -> None:
    """Let this thread, and those that it will start, run on these cores only, where the system lets us choose; and
    those that were bound with it before. Nothing happens where all are free and are to be."""
    global _bound
    if not hasattr(os, "sched_setaffinity") or (_bound is None and set(cores) == set(AVAILABLE)):
        return
    threads = [0]
    if _bound is not None:
        with contextlib.suppress(OSError):
            threads += [int(task.name) for task in _TASKS.iterdir() if _cores_of(int(task.name)) == _bound]
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            os.sched_setaffinity(thread, cores)
    _bound = set(cores) if set(cores) != set(AVAILABLE) else None


def roam() -> None:
    """Let this thread run wherever there is room, though who has started it is bound: it works beside the training."""
    if _bound is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, AVAILABLE)


def _cores_of(thread: int) -> set[int] | None:
    try:
        return os.sched_getaffinity(thread)
    except OSError:
        return None


def yield_to_senders() -> None:
    """Let gloo's threads that wait for data (those of this process) not take the core from whoever runs there.

    Such a thread is woken by an answer while another of our threads may still hold the lock of that connection, in the
    middle of sending. Gloo then tries the lock over and over, for as long as the scheduler lets it: on one core, that
    is a whole time slice in which nobody can let go of the lock. Threads of the batch class do not preempt.
    """
    for thread in _TASKS.glob("*"):  # none of it but on Linux
        with contextlib.suppress(OSError):  # a thread that has ended, a system that does not let us
            if (thread / "comm").read_text().strip() == "gloo_tcp_loop":
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
