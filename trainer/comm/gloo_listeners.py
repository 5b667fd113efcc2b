"""Gloo's listening sockets: once a group has formed, the kernel drops what else arrives there.

Gloo would keep each connection of a stranger, and a process without a free descriptor ends at once when gloo accepts
one.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

_SO_ATTACH_FILTER = 26
_making = threading.Lock()
T = TypeVar("T")
_log = logging.getLogger(__name__)


def find_listeners(make: Callable[[], T]) -> tuple[T, frozenset[int]]:
    """Return what ``make`` makes and the descriptors at which it listens; none if the system does not list them.

    Gloo's descriptors are new and inheritable; Python's own sockets are never inheritable."""
    with _making:
        before = _inherited_listeners()
        made = make()
        return made, frozenset(_inherited_listeners() - before)


def _inherited_listeners() -> set[int]:
    found = set[int]()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.get_inheritable(int(name)) and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(name))) as copy:
                        if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                            found.add(int(name))
    return found


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def deafen(descriptors: Iterable[int]) -> None:
    """Have the kernel drop all packets for these listening sockets (a packet filter that lets nothing through).

    Existing connections are not affected. Where the system has no such filter, the sockets stay open: gloo then keeps
    strangers' connections, up to the limit of descriptors."""
    if sys.platform != "linux":
        return
    nothing = _Instruction(0x06, 0, 0, 0)  # return 0: keep no byte of any packet
    program = _Program(1, ctypes.pointer(nothing))
    for descriptor in descriptors:
        try:
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))
        except OSError as error:
            _log.debug("gloo is still listening: %s", error)
