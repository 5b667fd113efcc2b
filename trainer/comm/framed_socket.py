"""Framed connections between ranks, on which `trainer.comm.parameter_server` and `trainer.comm.peer_to_peer` build.

No call on a socket blocks. A `Flow` describes what is sent or received, and `run_flows` carries out several flows at
once on one thread: a TLS connection must not be read by one thread and written by another.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SEND_BYTES = 1 << 18
MOST_JSON_BYTES = 1 << 26
SIZE = struct.Struct("!Q")

Flow = Generator[int, None, None]
"""Goes as far as it can without waiting, and yields the events of poll(2) that it has to wait for."""


class PeerError(Exception):
    """A failure of one rank's connection. ``told``: the server reported it, and it may concern any rank."""

    def __init__(self, rank: int | None, text: str, told: bool = False) -> None:
        super().__init__(text)
        self.rank, self.told = rank, told


class FramedSocket:
    """A connection to one rank. A server sends a worker each part after a "=", or a "!" and why there is none."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self._going: Flow | None = None

    def shake_hands(self) -> Flow:
        """Carry out the TLS handshake, if the connection uses TLS."""
        connection = self.connection
        while isinstance(connection, ssl.SSLSocket):
            try:
                connection.do_handshake()
                return
            except ssl.SSLWantReadError:
                yield select.POLLIN
            except ssl.SSLWantWriteError:
                yield select.POLLOUT

    def send(self, *pieces: Any) -> Flow:
        """Send the pieces in order; they must not change until the flow has ended."""
        self._going = self._send(*pieces)
        return self._going

    def refuse(self, rank: int | None, reason: str) -> Flow:
        """Send the reason why there is no result, then leave. It goes after the part being sent: within it, the peer
        would take it for data."""
        text = json.dumps({"rank": rank, "text": reason}).encode()
        with contextlib.suppress(OSError):
            if self._going is not None:
                yield from self._going
            yield from self._send(b"!", SIZE.pack(len(text)), text)
            yield from self.leave()

    def leave(self) -> Flow:
        """Stop sending, and read until the peer closes: closing a connection with unread data resets it, which also
        loses the data still being sent."""
        spare = bytearray(1 << 16)
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_WR)  # below TLS, like what follows
            receive = partial(socket.socket.recv_into, self.connection)
            while (yield from _when_ready(receive, spare, select.POLLIN)):
                pass

    def receive(self, buffer: memoryview | bytearray) -> Flow:
        """Receive exactly as many bytes as the buffer holds."""
        view, at = memoryview(buffer), 0
        while at < len(view):
            count = yield from _when_ready(self.connection.recv_into, view[at:], select.POLLIN)
            if not count:
                raise ConnectionResetError("it closed the connection")
            at += count

    def receive_parts(self, parts: Sequence[memoryview]) -> Flow:
        """Receive the parts that a server sends. Raise `PeerError` with the server's reason if it sends one instead."""
        mark = bytearray(1)
        for part in parts:
            yield from self.receive(mark)
            if mark == b"!":
                size = bytearray(SIZE.size)
                yield from self.receive(size)
                raw = bytearray(check_announced_size(self.rank, SIZE.unpack(size)[0]))
                yield from self.receive(raw)
                reason = parse_json_of_peer(self.rank, raw)
                raise PeerError(reason["rank"], reason["text"], told=True)
            if mark != b"=":
                raise PeerError(self.rank, "it uses another protocol; is training.tls the same on all nodes?")
            yield from self.receive(part)

    def _send(self, *pieces: Any) -> Flow:
        if sum(map(len, pieces)) <= SEND_BYTES:
            pieces = (b"".join(pieces),)  # one packet instead of several
        for piece in pieces:
            view, at = memoryview(piece), 0
            while at < len(view):
                at += yield from _when_ready(self.connection.send, view[at : at + SEND_BYTES], select.POLLOUT)


def _when_ready(action: Callable[[Any], int], argument: Any, event: int) -> Generator[int, None, int]:
    """Carry out a call on a socket; TLS may have to read before it can write, and the other way round."""
    while True:
        try:
            return action(argument)
        except ssl.SSLWantReadError:
            yield select.POLLIN
        except ssl.SSLWantWriteError:
            yield select.POLLOUT
        except BlockingIOError:
            yield event


def run_flows(flows: Sequence[tuple[FramedSocket, Flow]], silence: float, until: float | None = None) -> None:
    """Carry out all flows. ``silence``: the most seconds between two events; ``until``, where given, is the deadline
    instead (of `time.monotonic`). Raise `PeerError`, which names the first rank that fails or is late."""
    while True:
        left: list[tuple[FramedSocket, Flow]] = []
        events: dict[int, int] = {}
        for link, flow in flows:
            try:
                event = next(flow)
            except StopIteration:
                continue
            except OSError as error:
                raise PeerError(link.rank, str(error) or type(error).__name__) from error
            left.append((link, flow))
            events[link.connection.fileno()] = events.get(link.connection.fileno(), 0) | event
        if not left:
            return
        flows = left
        poll = select.poll()
        for number, event in events.items():
            poll.register(number, event)
        seconds = silence if until is None else until - time.monotonic()
        if seconds <= 0 or not poll.poll(math.ceil(seconds * 1000)):
            late = sorted({link.rank for link, _ in flows})
            others = f", nor from {late[1:]}" if late[1:] else ""
            raise PeerError(late[0], f"no data arrived from it in time{others}")


def open_connection(address: tuple[str, int], timeout: float) -> socket.socket:
    """Return a connection to the address. Raise OSError if nothing listens there."""
    connection = socket.create_connection(address, timeout=max(0.001, timeout))
    if (
        connection.getsockname() == connection.getpeername()
    ):  # without a listener, TCP on loopback can connect to itself
        connection.close()
        raise ConnectionRefusedError("nothing listens there")
    return connection


def prepare_socket(connection: socket.socket, tls: ssl.SSLContext | None, server_side: bool) -> socket.socket:
    """Return the connection to use from here on, before its TLS handshake. Raise OSError if it has ended already."""
    connection.setblocking(False)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is None:
        return connection
    return tls.wrap_socket(connection, server_side=server_side, do_handshake_on_connect=False)


def view_bytes(flat: torch.Tensor) -> memoryview:
    """Return the memory of a one-dimensional tensor on the CPU, without a copy."""
    import torch  # here: readers of a job's membership history import this module without torch

    return flat.view(torch.uint8).numpy().data


def check_announced_size(rank: int, size: int) -> int:
    """Return the size that a peer announces. Raise `PeerError` if it is too large to allocate safely."""
    if size > MOST_JSON_BYTES:
        raise PeerError(rank, f"it announces {size:,} bytes")
    return size


def parse_json_of_peer(rank: int, raw: bytearray) -> Any:
    """Return the value of a JSON text that ``rank`` has sent. Raise `PeerError` where it is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise PeerError(rank, f"what it sent is not JSON: {error}") from error
