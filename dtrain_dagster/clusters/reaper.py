"""A second process that ends the nodes' process groups when the supervisor dies without having done so."""

from __future__ import annotations

import contextlib
import os
import signal
import time

LIMIT_SECONDS = 10.0
POLL_SECONDS = 0.02


class Reaper:
    """Watches its parent through a pipe: the pipe's end means that the parent is gone, however it died.

    Asking the kernel to kill a child with its parent (PR_SET_PDEATHSIG) reaches the processes that the supervisor
    started, but not what those started in turn: the trainer behind a shell script, a data loader's workers. The reaper
    kills the whole group. Being a copy of the supervisor it holds the same lock, so the run directory is free only when
    nothing is left that could write into it.
    """

    def __init__(self) -> None:
        read, self._write = os.pipe()
        if os.fork() == 0:
            with contextlib.suppress(BaseException):
                os.close(self._write)
                _wait_and_kill(read)
            os._exit(0)
        os.close(read)

    def watch(self, group: int) -> None:
        """Kill this process group if the supervisor dies."""
        self._tell(b"+%d\n" % group)

    def forget(self, group: int) -> None:
        """The group is gone; its number may soon be someone else's."""
        self._tell(b"-%d\n" % group)

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody killed the reaper; the job can do without
            os.write(self._write, line)


def _wait_and_kill(read: int) -> None:
    os.setsid()  # whoever kills the supervisor's group must not take this process along
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    with os.fdopen(read, "rb") as lines:
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    deadline = time.monotonic() + LIMIT_SECONDS
    while (groups := {group for group in groups if group_alive(group)}) and time.monotonic() < deadline:
        for group in groups:
            signal_group(group, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


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
    """Is a process of the group left? One that has ended and waits for its parent to notice is not: an orphan's parent
    is the machine's first process, which in a container may take its time or never look."""
    if not signal_group(group, 0):
        return False
    if not os.path.isdir("/proc/self"):
        return True
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                state, _, its_group, *_ = file.read().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(its_group) == group and state not in "ZX":
            return True
    return False
