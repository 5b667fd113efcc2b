"""`Channel`: an authenticated connection to one peer, encrypted where there are certificates, and flows over it.

Connecting, TLS, framing and waiting belong here. What peers prove to each other is in `trainer.comm.handshake`; the
accepting side is `trainer.comm.listener`.

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

from trainer.comm.handshake import HELLO, PROOF_BYTES, REPLY, AuthenticationError, Caller, Listener

if TYPE_CHECKING:
    import torch

    from trainer.comm.tls import TLSContexts

TURN_BYTES = 1 << 18
"""The bytes after which a flow lets the others go on, so that all channels are used at once."""
MOST_JSON_BYTES = 1 << 26
RETRY_SECONDS = 0.05
"""The pause before another attempt to connect."""
MOST_DROPPED = 100
"""A caller whose connection was closed without an answer this often is not wanted; fewer times, the listener was busy
with others."""
SAME_SETTINGS = "are training.encryption and training.tls the same on all nodes, and do their clocks agree?"
AGAIN, WAIT = 0, -1
"""What a flow yields instead of events: it can go on at once; it waits for flows that stand before it in the list."""
ADMITTED, REFUSED = b"admitted", b"refused"
"""Codes of messages: an answer to a caller; the reason why there is no answer, and none will come."""
_LONGEST = (1 << 31) - 1
"""Milliseconds that poll(2) can wait."""
_HEAD = struct.Struct("!Q20sQ")
"""Before the data of a message: its number on this channel and in this direction, its code, and its bytes."""
HEAD_BYTES = _HEAD.size

Flow = Generator[int, None, None]
"""Goes as far as it can without waiting, and yields the events of poll(2) that it has to wait for."""


class PeerError(Exception):
    """A failure of one peer's channel; ``rank`` is None where none has failed. ``told``: another peer has reported it,
    and it may concern any rank."""

    def __init__(self, rank: int | None, text: str, told: bool = False) -> None:
        super().__init__(text)
        self.rank, self.told = rank, told


class Channel:
    """A connection to one peer, of rank ``peer``."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer, self.connection = peer, connection
        self._sent = self._received = 0
        self._going: Flow | None = None

    def shake_hands(self) -> Flow:
        """Carry out the TLS handshake, if the connection uses TLS."""
        if isinstance(self.connection, ssl.SSLSocket):
            yield from _when_ready(lambda _: self.connection.do_handshake(), None, select.POLLIN)  # type: ignore[attr-defined]

    def write(self, *pieces: Any) -> Flow:
        """Write the pieces in order. They must not change before they have left."""
        self._going = self._write(*pieces)
        return self._going

    def read(self, buffer: memoryview | bytearray) -> Flow:
        """Read exactly as many bytes as the buffer holds."""
        view, at, since = memoryview(buffer), 0, 0
        while at < len(view):
            try:
                count = self.connection.recv_into(view[at:])
            except (ssl.SSLWantReadError, BlockingIOError):
                yield select.POLLIN
                since = 0
                continue
            except ssl.SSLWantWriteError:
                yield select.POLLOUT
                continue
            if not count:
                raise ConnectionResetError("it closed the connection")
            at, since = at + count, since + count
            if since >= TURN_BYTES and at < len(view):
                yield AGAIN
                since = 0

    def send(self, code: bytes, *pieces: Any, size: int | None = None) -> Flow:
        """Send a message, or its first pieces where it has ``size`` bytes in all."""
        self._sent += 1
        return self.write(_HEAD.pack(self._sent, code, sum(map(len, pieces)) if size is None else size), *pieces)

    def expect(self, code: bytes, size: int | None = None) -> Generator[int, None, int]:
        """Receive the head of the next message, and return its bytes. Raise `PeerError` if the peer is at another one,
        or reports a failure. ``size``: the bytes that it must have, where they are known."""
        raw = bytearray(_HEAD.size)
        yield from self.read(raw)
        self._received += 1
        number, padded, bytes_ = _HEAD.unpack(raw)
        theirs = padded.rstrip(b"\0")
        if theirs == REFUSED:
            reason = parse_json_of_peer(self.peer, (yield from self._rest(bytes_)))
            raise PeerError(reason["rank"], reason["text"], told=True)
        if (number, theirs) != (self._received, code) or size not in (None, bytes_):
            self._refuse_message(raw, code, size)
        return int(bytes_)

    def exchange(self, code: bytes, data: memoryview, into: memoryview) -> Flow:
        """Send a message, and receive the peer's of the same code and size into ``into``, with `HEAD_BYTES` before its
        data: in as few calls as possible, for small messages."""
        self._sent += 1
        self._received += 1
        head = _HEAD.pack(self._sent, code, len(data))
        going = [memoryview(b"".join((head, data)))] if len(data) <= TURN_BYTES else [memoryview(head), data]
        expected = _HEAD.pack(self._received, code, len(data))
        send, receive, at = self.connection.send, self.connection.recv_into, 0
        while going or at < len(into):
            events = 0
            try:
                while going:
                    count = send(going[0])
                    going = [going[0][count:], *going[1:]] if count < len(going[0]) else going[1:]
            except (ssl.SSLWantWriteError, BlockingIOError):
                events |= select.POLLOUT
            except ssl.SSLWantReadError:
                events |= select.POLLIN
            try:
                while at < len(into):
                    if not (count := receive(into[at:])):
                        raise ConnectionResetError("it closed the connection")
                    at += count
                    if at >= HEAD_BYTES and into[:HEAD_BYTES] != expected:
                        self._refuse_message(into[:HEAD_BYTES], code, len(data))
            except (ssl.SSLWantReadError, BlockingIOError):
                events |= select.POLLIN
            except ssl.SSLWantWriteError:
                events |= select.POLLOUT
            if events:
                yield events

    def _refuse_message(self, head: memoryview | bytearray, code: bytes, size: int | None) -> None:
        number, theirs, bytes_ = _HEAD.unpack(head)
        raise PeerError(
            self.peer,
            f"rank {self.peer} is at message {number} ({_in_words(theirs)}, {bytes_:,} bytes); this rank is at "
            f"{self._received} ({_in_words(code)}, {'any number of' if size is None else f'{size:,}'} bytes)",
        )

    def receive(self, code: bytes) -> Generator[int, None, bytearray]:
        """Receive a message of a size that the peer announces: at most `MOST_JSON_BYTES`."""
        return (yield from self._rest((yield from self.expect(code))))

    def refuse(self, rank: int | None, reason: str) -> Flow:
        """Send the reason why there is no answer, then leave. It goes after what is being sent: within it, the peer
        would take it for data."""
        text = json.dumps({"rank": rank, "text": reason}).encode()
        with contextlib.suppress(OSError):
            if self._going is not None:
                yield from self._going
            yield from self.send(REFUSED, text)
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

    def shut(self) -> None:
        """Make all present and later calls fail at once. Any thread may call it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)  # an SSLSocket's own may wait for the peer

    def close(self) -> None:
        self.connection.close()

    def _rest(self, size: int) -> Generator[int, None, bytearray]:
        if size > MOST_JSON_BYTES:
            raise PeerError(self.peer, f"it announces {size:,} bytes")
        raw = bytearray(size)
        yield from self.read(raw)
        return raw

    def _write(self, *pieces: Any) -> Flow:
        if sum(map(len, pieces)) <= TURN_BYTES:
            pieces = (b"".join(pieces),)  # one packet, and one record of TLS, instead of several
        since = 0
        for piece in pieces:
            view, at = memoryview(piece), 0
            while at < len(view):
                count = yield from _when_ready(self.connection.send, view[at : at + TURN_BYTES], select.POLLOUT)
                at, since = at + count, since + count
                if since >= TURN_BYTES and at < len(view):
                    yield AGAIN
                    since = 0


def _in_words(code: bytes) -> str:
    return code.rstrip(b"\0").decode(errors="replace") or "something else"


def _when_ready(action: Callable[[Any], Any], argument: Any, event: int) -> Generator[int, None, Any]:
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


def run_flows(
    flows: Sequence[tuple[Channel, Generator[int, None, Any]]],
    silence: float,
    until: float | None = None,
    called_off: socket.socket | None = None,
    awake_seconds: float = 0.0,
) -> None:
    """Carry out all flows. ``silence``: the most seconds between two events; ``until``, where given, is the deadline
    instead (of `time.monotonic`). Raise `PeerError`, which names the first rank that fails or is late, or none if
    ``called_off`` has something to read and what has arrived does not suffice. ``awake_seconds``: for which to try
    again at once instead of waiting."""
    is_called_off = False
    awake_until = time.monotonic() + awake_seconds if awake_seconds else 0.0
    while True:
        left = []
        events: dict[int, int] = {}
        is_ready = False
        for channel, flow in flows:
            try:
                event = next(flow)
            except StopIteration:
                continue
            except OSError as error:
                if called_off is not None and _is_readable(called_off):  # which closed it
                    raise PeerError(None, "it was called off") from error
                raise PeerError(channel.peer, f"{error or type(error).__name__} (rank {channel.peer})") from error
            left.append((channel, flow))
            is_ready = is_ready or event == AGAIN
            if event > 0:
                number = channel.connection.fileno()
                events[number] = events.get(number, 0) | event
        if not left:
            return
        if is_called_off:
            raise PeerError(None, "it was called off")
        flows = left
        if awake_until and time.monotonic() < awake_until:
            continue
        poll = select.poll()
        if called_off is not None:
            poll.register(called_off, select.POLLIN)
        for number, event in events.items():
            poll.register(number, event)
        seconds = 0.0 if is_ready else silence if until is None else max(0.0, until - time.monotonic())
        ready = poll.poll(min(math.ceil(1000 * seconds), _LONGEST))
        is_called_off = called_off is not None and any(number == called_off.fileno() for number, _ in ready)
        if not ready and not is_ready:
            late = sorted({channel.peer for channel, _ in flows})
            raise PeerError(late[0], f"no data arrived from ranks {late} in time")


def _is_readable(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def connect(
    address: tuple[str, int],
    key: bytes,
    me: str,
    other: str,
    tls: TLSContexts | None,
    until: float,
    peer: int = 0,
    waits: bool = True,
) -> Channel:
    """Return a channel to the listener named ``other``, of rank ``peer``, which has admitted this process as ``me``.

    ``waits``: whether to wait, until ``until`` (of `time.monotonic`), for a listener that is not there yet. Raise
    `AuthenticationError` if somebody else is there, ConnectionRefusedError with the reason if the listener gives one,
    and another ConnectionError if there is no connection in time."""
    place, dropped = f"{address[0]}:{address[1]}", 0
    while True:
        channel = None
        try:
            connection = open_connection(address, until - time.monotonic())
            channel = Channel(peer, prepare_socket(connection, tls.client if tls else None, server_side=False))
            run_flows([(channel, _introduce(channel, key, me, other))], 0.0, until)
            return channel
        except (OSError, PeerError) as error:
            if channel is not None:
                channel.close()
            cause = error.__cause__ if isinstance(error, PeerError) else error
            if isinstance(cause, AuthenticationError):
                raise AuthenticationError(f"the process at {place} {str(cause).removeprefix('it ')}") from error
            if isinstance(error, PeerError) and error.told:
                raise ConnectionRefusedError(f"the process at {place} refused rank {me}: {error}") from error
            is_dropped = channel is not None and isinstance(
                cause, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError
            )
            dropped += is_dropped
            again = (channel is None and waits) or (is_dropped and dropped < MOST_DROPPED)
            if not again or time.monotonic() + RETRY_SECONDS >= until:
                hint = f"; {SAME_SETTINGS}" if channel is not None else ""
                raise ConnectionError(f"{place} cannot be reached: {error}{hint}") from error
        time.sleep(RETRY_SECONDS)


def _introduce(channel: Channel, key: bytes, me: str, other: str) -> Flow:
    yield from channel.shake_hands()
    caller, reply = Caller(key, me, other), bytearray(REPLY.size)
    yield from channel.write(caller.hello)
    yield from channel.read(reply)
    yield from channel.write(caller.answer(bytes(reply)))
    yield from channel.expect(ADMITTED, 0)


def authenticate_caller(channel: Channel, key: bytes, me: str, tls: TLSContexts | None) -> Generator[int, None, str]:
    """Return the proven name of who has connected. `connect` then waits for `ADMITTED`."""
    channel.connection = prepare_socket(channel.connection, tls.server if tls else None, server_side=True)
    yield from channel.shake_hands()
    listener, hello, proof = Listener(key, me), bytearray(HELLO.size), bytearray(PROOF_BYTES)
    yield from channel.read(hello)
    yield from channel.write(listener.reply(bytes(hello)))
    yield from channel.read(proof)
    return listener.admit(bytes(proof))


def open_connection(address: tuple[str, int], timeout: float) -> socket.socket:
    """Return a connection to the address. Raise OSError if nothing listens there."""
    connection = socket.create_connection(address, timeout=max(0.001, timeout))
    # Without a listener, TCP on loopback can connect to itself.
    if connection.getsockname() == connection.getpeername():
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


def parse_json_of_peer(rank: int, raw: bytearray) -> Any:
    """Return the value of a JSON text that ``rank`` has sent. Raise `PeerError` where it is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise PeerError(rank, f"what it sent is not JSON: {error}") from error
