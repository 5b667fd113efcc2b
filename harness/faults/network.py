"""Hosts as network namespaces, joined by a switch (`switch`) with links to cut, delay, throttle and restore."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.faults import switch


class NoNetworkError(RuntimeError):
    """This machine does not let us make network namespaces. The message says why."""


class Network:
    """``hosts`` hosts, each in a namespace of its own. Nothing of it is visible outside, and nothing is left of it."""

    def __init__(self, hosts: int = 3) -> None:
        if shutil.which("ip") is None:
            raise NoNetworkError("there is no `ip` command (iproute2)")
        self.hosts = hosts
        self._control, theirs = socket.socketpair()
        command = [sys.executable, str(Path(switch.__file__).resolve()), str(hosts)]
        self._process = subprocess.Popen(command, stdin=theirs, start_new_session=True)
        theirs.close()
        self._lines = self._control.makefile("rb")
        answer = json.loads(self._lines.readline() or b"{}")
        if "namespaces" not in answer:
            self.close()
            raise NoNetworkError(f"no network namespaces here: {answer.get('error', 'the switch died')}")
        self.namespaces: list[str] = answer["namespaces"]
        """Paths to enter them by, see `switch.enter`."""

    def __enter__(self) -> Network:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Take the switch away; the namespaces go with the last process in them."""
        self._lines.close()
        self._control.close()
        self._process.wait(10)

    def address(self, host: int) -> str:
        return switch.address(host)

    def cut(self, a: int, b: int, one_way: bool = False) -> None:
        """Nothing passes from ``a`` to ``b``, nor back unless ``one_way``."""
        self._set(_both(a, b, one_way), cut=True)

    def delay(self, a: int, b: int, seconds: float, one_way: bool = False) -> None:
        self._set(_both(a, b, one_way), delay=seconds)

    def throttle(self, a: int, b: int, bytes_per_second: float, one_way: bool = False) -> None:
        self._set(_both(a, b, one_way), rate=bytes_per_second)

    def restore(self, a: int, b: int) -> None:
        self._set(_both(a, b, False))

    def partition(self, group: Iterable[int]) -> None:
        """Cut every link between these hosts and the others."""
        inside = set(group)
        pairs = [(a, b) for a in inside for b in range(self.hosts) if b not in inside]
        self._set([way for a, b in pairs for way in _both(a, b, False)], cut=True)

    def restore_all(self) -> None:
        self._set([(a, b) for a in range(self.hosts) for b in range(self.hosts) if a != b])

    def _set(self, ways: list[tuple[int, int]], **how: Any) -> None:
        orders = [{"from": a, "to": b, **how} for a, b in ways]
        self._control.sendall(json.dumps(orders).encode() + b"\n")
        if not self._lines.readline():
            raise RuntimeError("the switch died")


def _both(a: int, b: int, one_way: bool) -> list[tuple[int, int]]:
    return [(a, b)] if one_way else [(a, b), (b, a)]
