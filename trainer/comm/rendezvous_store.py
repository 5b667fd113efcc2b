"""The store through which the ranks of a world find each other: keys and values at rank 0, for authenticated
ranks.

torch's own TCPStore trusts every connection, and gloo, NCCL and peer-to-peer connections read from it the addresses
that they connect to. Here every connection goes through `trainer.comm.handshake` first. On TCP, only an attacker on the
network path can change the later data."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from trainer.comm.channel import connect
from trainer.comm.listener import Door, check_rank
from trainer.comm.tls import TLSContexts
from trainer.errors import ConfigError

NAME = "store"
MOST_BYTES = 1 << 26
"""The largest message, in bytes: addresses are small, and a faulty peer must not fill the memory of rank 0."""
WAIT_SECONDS = 0.5
"""The server answers a wait after at most this time, so that other threads of the same rank get their turn."""
YIELD_SECONDS = 0.001
LOOK_SECONDS = 5.0
"""The seconds after which the thread that admits ranks checks whether the store was closed, if the system does not wake
it."""
_SIZE = struct.Struct("!I")
_KEPT: list[AuthenticatedStore] = []
"""Stores stay for as long as the process: threads of gloo and NCCL may be left behind in one (`trainer.comm.group`),
and C++ does not hold the Python half of an object. A closed one is small."""


def place_said(said: bytes, agents: tuple[str, int]) -> tuple[str, int]:
    """Return the host and port of rank 0's store, parsed from the store of torchrun's agents, which trusts anybody.
    Raise `ConfigError` if the entry is invalid."""
    port, _, host = said[:80].decode(errors="replace").partition(" ")
    try:
        if not 1 <= int(port) <= 65535:
            raise ValueError
        ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(
            f"the store of torchrun's agents at {agents[0]}:{agents[1]} says that rank 0 listens at {said[:80]!r}, "
            "which is not an address with a port: something else writes to that store; start all ranks again with "
            "another port (torchrun --master-port), which other programs cannot reach"
        ) from None
    return host, int(port)


class AuthenticatedStore(dist.Store):
    """One rank's end of the store, with the methods of `torch.distributed.Store`. A failure or timeout raises
    RuntimeError or its subclass `dist.DistStoreError`."""

    def __init__(
        self,
        address: tuple[str, int],
        rank: int,
        size: int,
        key: bytes,
        seconds: float,
        listener: socket.socket | None = None,
        tls: TLSContexts | None = None,
    ) -> None:
        """Connect to the store. ``listener``: rank 0's socket, bound to ``address``; the store owns it. ``seconds``:
        the timeout of every wait. ``tls``: None for plain connections.

        Raise `trainer.comm.handshake.AuthenticationError` if another process answers, another OSError if none answers
        within that time."""
        super().__init__()
        self._seconds, self._lock = seconds, threading.Lock()
        self._server = _Server(listener, size, key, tls) if listener is not None else None
        self._closed = False
        try:
            self._connection = connect(address, key, str(rank), NAME, tls, time.monotonic() + seconds).connection
            self._connection.setblocking(True)
        except BaseException:
            if self._server:
                self._server.close()
            raise
        _KEPT.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(b"S", key.encode(), _raw(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask(b"G", key.encode())[0]

    def add(self, key: str, value: int) -> int:
        return int(self._ask(b"A", key.encode(), str(value).encode())[0])

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(b"P", key.encode(), _raw(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask(b"C", key.encode(), _raw(expected), _raw(desired))[0]

    def delete_key(self, key: str) -> bool:
        return self._ask(b"D", key.encode())[0] == b"1"

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(b"K", *(key.encode() for key in keys))[0] == b"1"

    def num_keys(self) -> int:
        return int(self._ask(b"N")[0])

    deleteKey, getNumKeys = delete_key, num_keys

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. Raise `dist.DistStoreError` if they are not in time."""
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        until = time.monotonic() + seconds
        while True:
            left = max(0.0, until - time.monotonic())
            words = (str(min(WAIT_SECONDS, left)).encode(), *(key.encode() for key in keys))
            if self._ask(b"W", *words)[0] == b"1":
                return
            if left <= 0:
                raise dist.DistStoreError(f"wait timeout after {seconds:g} s: not all of {list(keys)} were set")
            time.sleep(YIELD_SECONDS)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._seconds)

    def clone(self) -> AuthenticatedStore:
        return self

    def close(self) -> None:
        """Make present and later calls fail at once, at rank 0 those of all ranks. Any thread may call it."""
        self._closed = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)  # an SSLSocket's own may wait for the peer
        if self._server:
            self._server.close()
        if self._lock.acquire(timeout=1.0):
            try:
                self._connection.close()
            finally:
                self._lock.release()

    def _ask(self, what: bytes, *words: bytes) -> list[bytes]:
        with self._lock:
            if self._closed:
                raise dist.DistStoreError("the store is closed")
            try:
                _send(self._connection, [what, *words])
                return _receive(self._connection)
            except OSError as error:
                raise dist.DistStoreError(f"the store at rank 0 cannot be reached: {error}") from error


class _Server:
    """Rank 0's server: a thread that admits ranks, and one thread that serves each of them."""

    def __init__(self, listener: socket.socket, size: int, key: bytes, tls: TLSContexts | None) -> None:
        self._listener, self._closed = listener, False
        self._door: Door[int] = Door(listener, key, NAME, lambda name: check_rank(name, size), tls)
        self._data: dict[bytes, bytes] = {}
        self._changed = threading.Condition()
        self._connections: set[socket.socket] = set()
        threading.Thread(target=self._admit, name="store", daemon=True).start()

    def close(self) -> None:
        with self._changed:
            connections, self._closed = set(self._connections), True
            self._changed.notify_all()
        for connection in (self._listener, *connections):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def _admit(self) -> None:
        """Admit ranks until the listener is shut down."""
        with self._listener:
            while not self._closed:
                try:
                    channel, rank = self._door.next(time.monotonic() + LOOK_SECONDS)
                except TimeoutError:
                    continue
                except OSError:
                    break
                connection = channel.connection
                connection.setblocking(True)
                with self._changed:
                    self._connections.add(connection)
                threading.Thread(target=self._serve, args=(connection,), name=f"store-{rank}", daemon=True).start()
            self._door.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, IndexError):
            while not self._closed:
                what, *words = _receive(connection)
                _send(connection, self._carry_out(what, words))
        with self._changed:
            self._connections.discard(connection)

    def _carry_out(self, what: bytes, words: list[bytes]) -> list[bytes]:
        with self._changed:
            data = self._data
            if what == b"G":
                return [data[words[0]]] if words[0] in data else [b""]
            if what == b"W":
                seconds, keys = float(words[0]), words[1:]
                self._changed.wait_for(lambda: self._closed or all(key in data for key in keys), seconds)
                return [b"%d" % all(key in data for key in keys)]
            if what == b"K":
                return [b"%d" % all(key in data for key in words)]
            if what == b"N":
                return [b"%d" % len(data)]
            if what == b"D":
                return [b"%d" % (data.pop(words[0], None) is not None)]
            if what == b"C":
                key, expected, desired = words
                if data.get(key, b"") == expected:
                    data[key] = desired
                    self._changed.notify_all()
                return [data.get(key, expected)]
            if what not in (b"S", b"A", b"P"):
                raise ValueError("it asks for something that does not exist")
            key, value = words
            if what == b"A":
                value = b"%d" % (int(data.get(key, b"0")) + int(value))
            data[key] = data.get(key, b"") + value if what == b"P" else value
            self._changed.notify_all()
            return [data[key] if what == b"A" else b""]


def _send(connection: socket.socket, words: Sequence[bytes]) -> None:
    body = b"".join(_SIZE.pack(len(word)) + word for word in words)
    if len(body) > MOST_BYTES:
        raise OSError(f"{len(body):,} bytes are not an address")
    connection.sendall(_SIZE.pack(len(body)) + body)


def _receive(connection: socket.socket) -> list[bytes]:
    """Return the words of one message. Raise OSError if the connection ends, ValueError if the message is invalid."""
    [size] = _SIZE.unpack(_exactly(connection, _SIZE.size))
    if size > MOST_BYTES:
        raise OSError(f"it announces {size:,} bytes")
    body, words, at = _exactly(connection, size), list[bytes](), 0
    while at < size:
        if at + _SIZE.size > size:
            raise ValueError("half a word")
        [length] = _SIZE.unpack_from(body, at)
        at += _SIZE.size
        if at + length > size:
            raise ValueError("half a word")
        words.append(body[at : at + length])
        at += length
    return words


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts, left = list[bytes](), size
    while left:
        part = connection.recv(min(left, 1 << 18))
        if not part:
            raise ConnectionResetError("it closed the connection")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _raw(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
