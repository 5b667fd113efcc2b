"""A process above the supervisor that ends all processes that the supervisor leaves, however it died.

Asking the kernel to kill a child with its parent (PR_SET_PDEATHSIG) reaches the processes that the supervisor started,
but not what those started in turn: the trainer behind a shell script, a data loader's workers, a daemon in a session of
its own. The reaper is the supervisor's parent, and both ask the kernel for the orphans among their descendants
(PR_SET_CHILD_SUBREAPER): none gets out of sight, whichever of the two is killed. The reaper holds the same lock as the
supervisor, so the run directory is free only when no process is left that could write into it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Container
from typing import Any

from dtrain_dagster.clusters.notices import Wanted
from trainer.node.processes import descendants, kill_all, marked

LIMIT_SECONDS = 10.0
_PR_SET_CHILD_SUBREAPER = 36

_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


class Reaper:
    """The supervisor's connection to its reaper: a pipe, whose end tells that the supervisor is gone."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def announce(self, news: Wanted, launch: int) -> None:
        """Have people told this of a launch; the supervisor has no time for that."""
        with contextlib.suppress(BrokenPipeError):  # somebody killed the reaper; the job can do without
            os.write(self._pipe, f"{news} {launch}\n".encode())


def run_under_reaper(
    work: Callable[[Reaper], int],
    token: str,
    afterwards: Callable[[], None],
    on_news: Callable[[Wanted, int], None] = lambda news, launch: None,
) -> int:
    """Do the work in a child; after its end, end all processes that it left and call ``afterwards``. Return the child's
    exit code, negative for a signal. ``on_news`` is called on a thread of its own with what the child has announced
    (`Reaper.announce`).

    ``token``: the mark of the processes of this job, see `trainer.node.processes.MARK`.
    """
    _take_in_orphans()
    codes: dict[int, int] = {}

    def reap(*_: object) -> None:
        """Reap ended orphans; without this they would stay as zombies for as long as the job runs."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, reap)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os._exit(_work(work, Reaper(write)))
    os.close(write)
    threads: list[threading.Thread] = []
    with os.fdopen(read) as lines:
        for line in lines:
            news, launch = line.split()
            threads.append(threading.Thread(target=on_news, args=(news, int(launch))))
            threads[-1].start()

    def left() -> set[int]:
        return (descendants(os.getpid(), token) | marked(token)) - {os.getpid(), child}

    kill_all(left, LIMIT_SECONDS)
    with contextlib.suppress(Exception):  # a full disk, which may be what the supervisor died of
        afterwards()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if child not in codes:
        codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for thread in threads:
        thread.join()
    return codes[child]


def reap_orphans(own: Container[int]) -> None:
    """Reap adopted orphans that have ended; the ends of the ``own`` processes are left to the code that started
    them."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in own:
                return  # it hides the others until it is looked at, which is soon
            os.waitpid(ended.si_pid, os.WNOHANG)


def _take_in_orphans() -> None:
    if _libc:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _work(work: Callable[[Reaper], int], reaper: Reaper) -> int:
    """Run the child's whole life and return its exit code."""
    code = 1
    try:
        _take_in_orphans()
        os.setsid()  # a signal to the supervisor's group must not end the reaper too
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        code = work(reaper)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code
