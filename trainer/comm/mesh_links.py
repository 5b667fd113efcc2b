"""Links of an encrypted mesh: a TLS connection between each two ranks, and the flows of several of them on one thread.

Forming the links, renewing their keys, and waiting for all of them at once belong here. The collectives over them are
in `trainer.comm.encrypted_mesh`.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import struct
import time
from collections.abc import Generator, Mapping, Sequence

from trainer.comm.framed_socket import Flow, FramedSocket, PeerError, open_connection, prepare_socket
from trainer.comm.handshake import AuthenticationError, authenticate_caller, authenticate_to_listener, parse_rank
from trainer.comm.listener import SPEAK_SECONDS, Door
from trainer.comm.tls import TLSContexts

TLS_SECONDS = 4.0
"""Additional seconds for a new connection to authenticate, since TLS comes first."""
RETRY_SECONDS = 0.05
"""The pause before a connection that was dropped is tried again."""
MOST_RECORDS = 1 << 23
"""The most records of TLS that are encrypted with one key, at most 137 GB. RFC 8446 (5.5) recommends at most 2^24.5 for
AES-GCM; Python's `ssl` can neither count them nor change the key of a connection, so a link makes a new handshake."""
TURN_BYTES = 1 << 18
"""The bytes after which a flow lets the others go on, so that all links are used at once."""
AGAIN, WAIT = 0, -1
"""What a flow yields instead of events: it can go on at once; it waits for flows that stand before it in the list."""
_LONGEST = (1 << 31) - 1
"""Milliseconds that poll(2) can wait."""
_HEAD = struct.Struct("!QcQ")
"""Before the data of an operation: its number on this link and in this direction, its code, and its bytes."""


class MeshLink:
    """The connection to one other rank. ``is_caller``: whether this rank has connected to the other."""

    def __init__(self, peer: int, connection: socket.socket, is_caller: bool) -> None:
        self.peer, self.is_caller = peer, is_caller
        self.connection = connection
        self._sent = self._received = 0
        self._records = 0

    @property
    def is_due(self) -> bool:
        """Whether the keys have encrypted enough. Both ends say the same between two operations, because both count
        what went in both directions."""
        return self._records >= MOST_RECORDS

    def renew(self, contexts: TLSContexts) -> Flow:
        """Make a new TLS handshake on the same TCP connection, between two operations: nothing of the old one is left
        then, because TLS reads record by record and no session tickets are sent."""
        raw = socket.socket(fileno=self.connection.detach())
        context = contexts.client if self.is_caller else contexts.server
        self.connection = prepare_socket(raw, context, server_side=not self.is_caller)
        self._records = 0
        yield from FramedSocket(self.peer, self.connection).shake_hands()

    def head(self, code: bytes, size: int, pieces: Sequence[memoryview] = ()) -> Sequence[memoryview]:
        """Return the head of the next operation, of ``size`` bytes, and the pieces, as they are to be written."""
        self._sent += 1
        self._count(size)
        head = _HEAD.pack(self._sent, code, size)
        if size <= TURN_BYTES:
            return [memoryview(b"".join((head, *pieces)))]  # one record instead of several
        return [memoryview(head), *pieces]

    def expect(self, code: bytes, size: int | None) -> Generator[int, None, int]:
        """Receive the head of the next operation, and return its bytes. Raise `PeerError` if the other rank is at
        another operation. ``size``: the bytes that it must have, where they are known."""
        raw = bytearray(_HEAD.size)
        yield from self.read(memoryview(raw))
        self._received += 1
        number, theirs, bytes_ = _HEAD.unpack(raw)
        if (number, theirs) != (self._received, code) or size not in (None, bytes_):
            raise PeerError(
                self.peer,
                f"rank {self.peer} is at operation {number} ({theirs!r}, {bytes_} bytes) of this link; this rank is at "
                f"{self._received} ({code!r}, {'any number of' if size is None else size} bytes)",
            )
        self._count(bytes_)
        return int(bytes_)

    def read(self, view: memoryview) -> Flow:
        """Receive exactly as many bytes as the view holds."""
        at = since = 0
        receive = self.connection.recv_into
        while at < len(view):
            try:
                count = receive(view[at:])
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

    def write(self, pieces: Sequence[memoryview]) -> Flow:
        """Write the pieces in order. They must not change before they have left."""
        send, since = self.connection.send, 0
        for piece in pieces:
            at = 0
            while at < len(piece):
                try:
                    count = send(piece[at : at + TURN_BYTES])
                except (ssl.SSLWantWriteError, BlockingIOError):
                    yield select.POLLOUT
                    since = 0
                    continue
                except ssl.SSLWantReadError:
                    yield select.POLLIN
                    continue
                at, since = at + count, since + count
                if since >= TURN_BYTES and at < len(piece):
                    yield AGAIN
                    since = 0

    def _count(self, size: int) -> None:
        self._records += 2 + size // 8192  # a record has up to 16 KiB, the last one of each piece less

    def shut(self) -> None:
        """Make all present and later calls fail at once. Any thread may call it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)  # an SSLSocket's own may wait for the peer


def run_flows(
    flows: Sequence[tuple[MeshLink, Flow]], called_off: socket.socket, silence: float, until: float | None = None
) -> None:
    """Carry out all flows. ``silence``: the most seconds between two events; ``until``, where given, is the deadline
    instead (of `time.monotonic`). Raise `PeerError`, which names the first rank that fails or is late, or none if
    ``called_off`` has something to read and what has arrived does not suffice."""
    is_called_off = False
    while True:
        left: list[tuple[MeshLink, Flow]] = []
        events: dict[int, int] = {}
        is_ready = False
        for link, flow in flows:
            try:
                event = next(flow)
            except StopIteration:
                continue
            except OSError as error:
                raise PeerError(link.peer, f"{error or type(error).__name__} (rank {link.peer})") from error
            left.append((link, flow))
            is_ready = is_ready or event == AGAIN
            if event > 0:
                number = link.connection.fileno()
                events[number] = events.get(number, 0) | event
        if not left:
            return
        if is_called_off:
            raise PeerError(None, "it was called off")
        flows = left
        poll = select.poll()
        poll.register(called_off, select.POLLIN)
        for number, event in events.items():
            poll.register(number, event)
        seconds = 0.0 if is_ready else silence if until is None else max(0.0, until - time.monotonic())
        ready = poll.poll(min(math.ceil(1000 * seconds), _LONGEST))
        is_called_off = any(number == called_off.fileno() for number, _ in ready)
        if not ready and not is_ready:
            late = sorted({link.peer for link, _ in flows})
            raise PeerError(late[0], f"no data arrived from ranks {late} in time")


def connect_links(
    places: Sequence[tuple[str, int]], rank: int, listener: socket.socket, contexts: TLSContexts, key: bytes,
    timeout: float,
) -> dict[int, MeshLink]:  # fmt: skip
    """Return this rank's links to all others, by rank, once all have come. Each rank connects to the ranks below it.

    ``places``: the host and port at which each rank listens; ``listener``: this rank's socket there, which is closed.
    ``key``: the key that only these ranks have. Raise OSError, which says who was turned away, if at least one rank
    does not succeed in ``timeout`` seconds."""
    until, size = time.monotonic() + timeout, len(places)
    links: dict[int, MeshLink] = {}
    door: Door[int] = Door(
        listener, lambda guest: _welcome(guest, contexts, key, rank, size, links), SPEAK_SECONDS + TLS_SECONDS
    )
    try:
        for peer, place in enumerate(places[:rank]):
            links[peer] = MeshLink(peer, _reach(place, contexts, key, rank, peer, until), is_caller=True)
        while len(links) < size - 1:
            guest, who = door.next(until)
            links[who] = MeshLink(who, guest.connection, is_caller=False)
    except BaseException as error:
        for link in links.values():
            link.connection.close()
        if isinstance(error, TimeoutError):
            late = [peer for peer in range(size) if peer != rank and peer not in links]
            message = "; ".join([f"ranks {late} did not connect within {timeout:g} s", *door.refused[-3:]])
            raise TimeoutError(message) from error
        raise
    finally:
        door.close()
        listener.close()
    return {peer: links[peer] for peer in sorted(links)}


def _reach(
    place: tuple[str, int], contexts: TLSContexts, key: bytes, rank: int, peer: int, until: float
) -> socket.socket:
    """Return a mutually authenticated connection to another rank. Raise OSError if there is none by ``until``."""
    nobody, _keep = socket.socketpair()
    with nobody, _keep:
        while True:
            raw = open_connection(place, until - time.monotonic())
            link = MeshLink(peer, prepare_socket(raw, contexts.client, server_side=False), is_caller=True)
            try:
                run_flows([(link, _introduce(link, key, rank))], nobody, 0.0, until)
                return link.connection
            except PeerError as error:
                link.connection.close()
                cause = error.__cause__
                dropped = isinstance(cause, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError)
                if not dropped or time.monotonic() + RETRY_SECONDS >= until:
                    hint = "" if isinstance(cause, AuthenticationError) else f"; {SAME_SETTINGS}"
                    raise OSError(f"rank {peer} at {place[0]}:{place[1]}: {error}{hint}") from error
            time.sleep(RETRY_SECONDS)


SAME_SETTINGS = "are training.encryption and training.tls the same on all nodes, and do their clocks agree?"


def _introduce(link: MeshLink, key: bytes, rank: int) -> Flow:
    """Authenticate this rank to the one that it has connected to, and wait for its word that it is admitted."""
    framed = FramedSocket(link.peer, link.connection)
    yield from framed.shake_hands()
    yield from authenticate_to_listener(framed, key, str(rank), str(link.peer))
    yield from framed.receive_parts([memoryview(b"")])


def _welcome(
    guest: FramedSocket, contexts: TLSContexts, key: bytes, rank: int, size: int, links: Mapping[int, MeshLink]
) -> Generator[int, None, int]:
    """Return the proven rank of the caller, once it knows that it is admitted."""
    guest.connection = prepare_socket(guest.connection, contexts.server, server_side=True)
    yield from guest.shake_hands()
    who = parse_rank((yield from authenticate_caller(guest, key, str(rank))), size)
    if who <= rank or who in links:
        raise PeerError(None, f"rank {who} is not expected by rank {rank}")
    yield from guest.send(b"=")
    return who
