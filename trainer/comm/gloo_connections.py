"""Authentication of gloo's own connections, which use no secret: each is proven once a group has formed.

Gloo takes the first connection that names a pair's number, which is small and easy to guess. A stranger can therefore
connect before the peer, and its data would be summed. It cannot answer the challenge of `prove_connections`, so the
group fails. Afterwards new connections are dropped: gloo would keep each of them, and a process without a free
descriptor ends at once when gloo accepts one.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import logging
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainer.comm.handshake import AuthenticationError

_NONCE = 32
_SO_ATTACH_FILTER = 26
_making = threading.Lock()
T = TypeVar("T")
_log = logging.getLogger(__name__)


def prove_connections(group: Any, rank: int, size: int, key: bytes, seconds: float) -> None:
    """Have each pair of ranks prove to each other, over gloo's connection between them, that they have the key.

    Raise `AuthenticationError` with the ranks that did not, and gloo's error if one sends nothing in ``seconds``."""
    mine = torch.frombuffer(bytearray(secrets.token_bytes(_NONCE * size)), dtype=torch.uint8).view(size, _NONCE)
    theirs = _swapped(group, mine, seconds)

    def proof(maker: int, checker: int, challenge: torch.Tensor, own: torch.Tensor) -> bytes:
        text = struct.pack("!II", maker, checker) + bytes(challenge.tolist()) + bytes(own.tolist())
        return hmac.digest(key, text, hashlib.sha256)

    answers = [proof(rank, peer, theirs[peer], mine[peer]) for peer in range(size)]
    got = _swapped(group, torch.frombuffer(bytearray(b"".join(answers)), dtype=torch.uint8).view(size, _NONCE), seconds)
    expected = [proof(peer, rank, mine[peer], theirs[peer]) for peer in range(size)]
    false = [
        peer
        for peer in range(size)
        if peer != rank and not hmac.compare_digest(bytes(got[peer].tolist()), expected[peer])
    ]
    if false:
        raise AuthenticationError(
            f"gloo's connections of rank {rank} to ranks {false} lead to a process that does not know this "
            "launch's secret: a foreign process connected before them"
        )


def _swapped(group: Any, rows: torch.Tensor, seconds: float) -> torch.Tensor:
    """Return rows of which row i comes from rank i; row j of ``rows`` goes to rank j over gloo's connections."""
    output, options = torch.empty_like(rows), dist.AllToAllOptions()
    options.timeout = timedelta(seconds=seconds)
    group.alltoall_base(output, rows.contiguous(), [], [], options).wait()
    return output


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
