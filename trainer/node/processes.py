"""The processes that a job has left on this machine, found by group, by descent, and by a mark in their environment.

A process can leave its group (``setsid``), its parent can end before it, and it can start others with an environment of
their own; it cannot easily do all of it at once. Each function asks `psutil` again, because a process number may belong
to another process by the next call.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import psutil

MARK = "DTRAIN_JOB_TOKEN"
"""The environment variable that every process of a job inherits: the job's token, then launch, node and incarnation."""
POLL_SECONDS = 0.02


def _mark_of(pid: int) -> str | None:
    """Return the inherited mark of a process; "" without one, None where it has ended or cannot be read (another
    user's)."""
    try:
        return psutil.Process(pid).environ().get(MARK, "")
    except psutil.Error:
        return None


def _is_running(pid: int) -> bool:
    """Return whether a process runs. One that has ended and waits for its parent to notice does not: an orphan's parent
    is the machine's first process, which in a container may take its time or never look."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def marked(mark: str) -> set[int]:
    """Return the processes that inherited this mark, or one that begins with it."""
    return {pid for pid in psutil.pids() if (_mark_of(pid) or "").startswith(mark) and _is_running(pid)}


def descendants(root: int, token: str) -> set[int]:
    """Return the processes that ``root`` started, directly or not. Those of another job, submitted from within this
    one, are left out: they outlive this job."""
    children: dict[int | None, list[int]] = defaultdict(list)
    for pid in psutil.pids():  # not `psutil.Process.children`, which loses some where the clock is set back meanwhile
        children[parent_of(pid)].append(pid)
    found: set[int] = set()
    waiting = list(children[root])
    while waiting:
        pid = waiting.pop()
        mark = _mark_of(pid)
        if mark and not mark.startswith(token):
            continue
        if _is_running(pid):
            found.add(pid)
        waiting += children[pid]
    return found


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process; those that have ended are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_all(find: Callable[[], set[int]], limit_seconds: float) -> bool:
    """Send SIGKILL to all that ``find`` returns, again and again, since they may start others; return True once it
    finds none, False if it still finds some after ``limit_seconds``."""
    deadline = time.monotonic() + limit_seconds
    while pids := find():
        if time.monotonic() > deadline:
            return False
        signal_all(pids, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return True


def parent_of(pid: int) -> int | None:
    """Return the number of the parent; None where the process has ended."""
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return None


def command_of(pid: int) -> list[str]:
    """Return the words of its command line; none where the process has ended or is another user's."""
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def has_open(pid: int, path: str | os.PathLike[str]) -> bool:
    """Return whether the process has this very file open. Without /proc that cannot be determined: True.

    `psutil` gives paths of open files only; by now another file may have that path.
    """
    if not os.path.isdir("/proc/self"):
        return True
    with contextlib.suppress(OSError):
        wanted = os.stat(path)
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), wanted):
                    return True
    return False


def signal_if(pid: int, number: int, is_right: Callable[[int], bool]) -> bool:
    """Send a signal to the process if ``is_right`` accepts it; return whether it did. Where the kernel has process
    handles, the process cannot end in between with its number used again."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if not hasattr(os, "pidfd_open"):
            if right := is_right(pid):
                os.kill(pid, number)
            return right
        handle = os.pidfd_open(pid)
        try:
            if right := is_right(pid):
                signal.pidfd_send_signal(handle, number)
            return right
        finally:
            os.close(handle)
    return False


def signal_group(group: int, number: int) -> bool:
    """Send a signal to every process of a group; return False if there is none."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # there is one, of another user
    return True


def group_alive(group: int) -> bool:
    """Return whether a process of the group still runs."""
    if not signal_group(group, 0):
        return False
    return any(group_of(pid) == group and _is_running(pid) for pid in psutil.pids())


def group_of(pid: int) -> int | None:
    """Return the process group; None where the process has ended."""
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return None
