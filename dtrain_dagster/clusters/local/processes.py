"""Which processes a job has left on this machine: by group, by descent, and by a mark in their environment.

A process can leave its group (``setsid``), its parent can end before it, and it can start others with an environment of
their own; it cannot easily do all of it at once. Where there is no /proc, there are only groups.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MARK = "DTRAIN_JOB_TOKEN"
"""The variable that whatever a job starts inherits: the job's token, then launch, node and stay."""
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class _Entry:
    pid: int
    parent: int
    group: int


def _scan() -> list[_Entry]:
    """Every process that runs. One that has ended and waits for its parent to notice does not: an orphan's parent is
    the machine's first process, which in a container may take its time or never look."""
    entries = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                state, parent, group, *_ = file.read().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if state not in "ZX":
            entries.append(_Entry(int(name), int(parent), int(group)))
    return entries


def _has_proc() -> bool:
    return os.path.isdir("/proc/self")


def _mark_of(pid: int) -> str | None:
    """What it inherited as its mark; "" where nothing, None where it cannot be read (another user's)."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return None
    start = f"{MARK}=".encode()
    return next((item[len(start) :].decode(errors="replace") for item in variables if item.startswith(start)), "")


def marked(mark: str) -> set[int]:
    """Processes that inherited this mark, or one that begins with it."""
    if not _has_proc():
        return set()
    return {entry.pid for entry in _scan() if (_mark_of(entry.pid) or "").startswith(mark)}


def descendants(root: int, token: str) -> set[int]:
    """Processes that ``root`` started, directly or not. Another job's, submitted from within this one, are its own:
    they outlive this one."""
    if not _has_proc():
        return set()
    children: dict[int, list[int]] = defaultdict(list)
    for entry in _scan():
        children[entry.parent].append(entry.pid)
    found: set[int] = set()
    waiting = list(children[root])
    while waiting:
        pid = waiting.pop()
        mark = _mark_of(pid)
        if mark and not mark.startswith(token):
            continue
        found.add(pid)
        waiting += children[pid]
    return found


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_all(find: Callable[[], set[int]], limit_seconds: float) -> bool:
    """SIGKILL to all that ``find`` finds, again and again, since they may start others; True once it finds none."""
    deadline = time.monotonic() + limit_seconds
    while pids := find():
        if time.monotonic() > deadline:
            return False
        signal_all(pids, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return True


def process_ids() -> list[int]:
    """Of all that run on this machine, as far as it says so."""
    return [entry.pid for entry in _scan()] if _has_proc() else []


def parent_of(pid: int) -> int | None:
    """None where it has ended."""
    return next((entry.parent for entry in _scan() if entry.pid == pid), None)


def command_of(pid: int) -> list[str]:
    """The words that it was started with; none where it has ended or is another user's."""
    if _has_proc():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
        except OSError:
            return []
    import psutil

    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def has_open(pid: int, path: str | os.PathLike[str]) -> bool:
    """Does the process have this very file open? Where there is no /proc that cannot be told: True."""
    if not _has_proc():
        return True
    with contextlib.suppress(OSError):
        wanted = os.stat(path)
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), wanted):
                    return True
    return False


def signal_if(pid: int, number: int, is_right: Callable[[int], bool]) -> bool:
    """Send a signal to the process that ``is_right``; whether it was. It cannot end, and its number be used again, in
    between, where the kernel has handles of processes."""
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
    """Send a signal to every process of a group; False if there is none."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # there is one, of another user
    return True


def group_alive(group: int) -> bool:
    """Does a process of the group still run?"""
    if not signal_group(group, 0):
        return False
    return not _has_proc() or any(entry.group == group for entry in _scan())
