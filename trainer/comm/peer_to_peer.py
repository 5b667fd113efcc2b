"""`PeerToPeerAllReduce`: a connection between each two ranks of a small world, for sums of few bytes.

A sum by gloo wakes two threads, one after the other, on each rank, and among several it goes around a ring. Where a
model's gradients are some kilobytes, that takes longer than to send and to add them. Here the training thread does
all of it: it sends its tensor to each other rank, receives theirs, and adds them up. Without it, a step of the stock
model with 64 samples per rank takes 1.18 times as long on two cores (quartiles 1.10 and 1.21, `benchmarks.cpu_parts`).
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import struct
import time
from collections.abc import Generator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.framed_socket import FramedSocket, PeerError, open_connection, prepare_socket, run_flows, view_bytes
from trainer.comm.handshake import AuthenticationError, authenticate_caller, authenticate_to_listener, parse_rank
from trainer.comm.listener import BACKLOG, Door
from trainer.runtime.affinity import AVAILABLE

MOST_RANKS = 8
"""The most ranks with peer-to-peer connections: in larger worlds too few sums are small enough."""
NEAR_BYTES, FAR_BYTES = 1 << 20, 16 << 10
"""The most bytes that a rank sends for a sum: the first within one host and between two ranks, where a ring would not
send less; the second otherwise."""
UNSHARED = 32768
"""The numbers that torch adds up on one thread, however many threads it has: on the communication thread, more would
start a second pool of threads, which takes cores from the step."""
AWAKE_SECONDS = 2e-4
"""The seconds for which a waiting rank polls, if it takes no core from another rank: waking up from sleep takes longer
than all the rest of a sum."""
FORMING_SECONDS, RETRY_SECONDS = 5.0, 0.02
"""The most seconds to connect to all others; and those before a dropped connection is tried again."""
_LONGEST = (1 << 31) - 1
"""Milliseconds that poll(2) can wait."""
_HEAD = struct.Struct("!QQ")
"""Before each message: the number of the sum, and its bytes."""


class PeerToPeerAllReduce:
    """One rank's links to all others. All ranks must call `all_reduce` in the same order, on one thread at a time.

    ``timeout``: seconds of silence during a sum that count as a failure. A failure raises
    `trainer.comm.framed_socket.PeerError`; the links cannot be used again, and the tensor's content is undefined.
    """

    def __init__(
        self, rank: int, sockets: Mapping[int, socket.socket], timeout: float, one_host: bool = False,
        awake_seconds: float = 0.0,
    ) -> None:  # fmt: skip
        """Use ``sockets``, one to each other rank, by rank. ``one_host``: whether all ranks are on one host.
        ``awake_seconds``: see `AWAKE_SECONDS`."""
        self.rank, self.size, self.timeout = rank, len(sockets) + 1, timeout
        self._limit = (NEAR_BYTES if one_host or self.size == 2 else FAR_BYTES) // len(sockets)
        self._sockets = {peer: sockets[peer] for peer in sorted(sockets)}
        self._awake_seconds = awake_seconds
        self._number = 0
        self._spare: dict[tuple[int, torch.dtype], dict[int, tuple[Tensor, memoryview]]] = {}
        self._called_off, self._call_off = socket.socketpair()
        self._call_off.setblocking(False)  # nobody takes out what is put in

    def takes(self, tensor: Tensor) -> bool:
        """Return whether the tensor is small enough; the answer is the same on all ranks."""
        return tensor.nbytes <= self._limit

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over ranks, in place, with the same bits on all of them. ``tensor``: contiguous, on the CPU."""
        flat = tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)
        self._number += 1
        theirs = self._buffers(flat)
        message = [memoryview(_HEAD.pack(self._number, flat.nbytes)), view_bytes(flat)]
        self._carry_out([_Exchange(peer, self._sockets[peer], message, memory) for peer, (_, memory) in theirs.items()])
        # In order of rank, so that rounding is the same everywhere; of two, either order gives the same.
        ordered = [part for part, _ in theirs.values()]
        ordered.insert(0 if self.size == 2 else self.rank, flat)
        total, *rest = ordered
        for part in rest:
            _add(total, part)
        if total is not flat:
            flat.copy_(total)

    def interrupt(self) -> None:
        """Make present and later calls fail at once, unless all data has arrived already. Any thread may call it; peers
        are not told."""
        with contextlib.suppress(OSError):
            self._call_off.send(b"!")

    def close(self) -> None:
        """Close the links. While another thread uses them, call `interrupt` instead."""
        for connection in (*self._sockets.values(), self._called_off, self._call_off):
            connection.close()

    def _buffers(self, flat: Tensor) -> dict[int, tuple[Tensor, memoryview]]:
        """Return for each peer a buffer for its tensor and the buffer's memory; they are reused."""
        key = flat.numel(), flat.dtype
        if key not in self._spare:
            if len(self._spare) > 8:
                self._spare.clear()
            parts = {peer: torch.empty_like(flat) for peer in self._sockets}
            self._spare[key] = {peer: (part, view_bytes(part)) for peer, part in parts.items()}
        return self._spare[key]

    def _carry_out(self, exchanges: Sequence[_Exchange]) -> None:
        """Carry out all exchanges: each as far as possible without waiting, then wait for those that are not done."""
        awake_until, called_off = time.monotonic() + self._awake_seconds, False
        while True:
            left = []
            for exchange in exchanges:
                try:
                    exchange.go_on()
                except OSError as error:
                    raise PeerError(exchange.peer, f"{error or type(error).__name__} (rank {exchange.peer})") from error
                if not exchange.is_done:
                    left.append(exchange)
            if not left:
                return
            if called_off:  # and what was there already has not sufficed
                raise PeerError(None, "it was called off")
            exchanges = left
            if time.monotonic() < awake_until:
                continue
            poll = select.poll()
            poll.register(self._called_off, select.POLLIN)
            for exchange in left:
                poll.register(exchange.connection, select.POLLIN | select.POLLOUT * bool(exchange.going))
            ready = poll.poll(min(math.ceil(1000 * self.timeout), _LONGEST))
            called_off = any(number == self._called_off.fileno() for number, _ in ready)
            if not ready:
                late = sorted(exchange.peer for exchange in left)
                raise PeerError(late[0], f"no data arrived from ranks {late} for {self.timeout:g} s")


def _add(total: Tensor, part: Tensor) -> None:
    if total.numel() <= UNSHARED:
        total += part
        return
    for mine, other in zip(total.split(UNSHARED), part.split(UNSHARED), strict=True):
        mine += other


class _Exchange:
    """The remaining data of one peer, to send and to receive: the head and its payload."""

    __slots__ = ("_expected", "_head", "coming", "connection", "going", "peer")

    def __init__(self, peer: int, connection: socket.socket, message: list[memoryview], into: memoryview) -> None:
        self.peer, self.connection, self.going, self._expected = peer, connection, message, message[0]
        self._head = memoryview(bytearray(_HEAD.size))
        self.coming = [self._head, into]

    @property
    def is_done(self) -> bool:
        return not self.going and not self.coming

    def go_on(self) -> None:
        """Send and receive as far as possible without waiting."""
        try:
            while self.going:
                self.going = _rest(self.going, self.connection.sendmsg(self.going))
        except BlockingIOError:
            pass
        try:
            while self.coming:
                count = self.connection.recvmsg_into(self.coming)[0]
                if not count:
                    raise ConnectionResetError("it closed the connection")
                self.coming = _rest(self.coming, count)
                if len(self.coming) < 2 and self._head != self._expected:
                    raise PeerError(self.peer, self._odds())
        except BlockingIOError:
            pass

    def _odds(self) -> str:
        (theirs, their_bytes), (own, own_bytes) = _HEAD.unpack(self._head), _HEAD.unpack(self._expected)
        return f"rank {self.peer} is at sum {theirs}, of {their_bytes} bytes; this is {own}, of {own_bytes}"


def _rest(parts: list[memoryview], done: int) -> list[memoryview]:
    """Return the parts without their first ``done`` bytes."""
    for place, part in enumerate(parts):
        if done < len(part):
            return [part[done:], *parts[place + 1 :]]
        done -= len(part)
    return []


def connect_all(
    store: dist.Store, rank: int, size: int, host: str, timeout: float, key: bytes = b""
) -> PeerToPeerAllReduce:
    """Return this rank's links to all others; they exchange addresses through ``store``, which no other group uses.

    ``host``: this host's address. ``key``: the key that only these ranks have. Raise OSError if at
    least one rank does not succeed in time."""
    sockets = dict[int, socket.socket]()
    with contextlib.ExitStack() as opened:
        place = None
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = opened.enter_context(socket.create_server((host, 0), family=family, backlog=BACKLOG))
            place = host, listener.getsockname()[1]
        finally:
            store.set(str(rank), json.dumps(place))  # others wait for it, whatever it is
        places = [json.loads(store.get(str(peer))) for peer in range(size)]
        if None in places:
            raise OSError(f"rank {places.index(None)} does not listen at any address")
        until = time.monotonic() + min(FORMING_SECONDS, timeout / 2)  # others may wait in a collective already
        door: Door[int] = Door(listener, lambda guest: _welcome(guest, key, rank, size, sockets))
        opened.callback(door.close)
        try:
            for peer, (address, port) in enumerate(places[:rank]):
                sockets[peer] = _reach((address, port), key, rank, peer, until)
            while len(sockets) < size - 1:
                guest, who = door.next(until)
                sockets[who] = guest.connection
        except BaseException:
            for connection in sockets.values():
                connection.close()
            raise
    here = sum(address == host for address, _ in places)
    awake = AWAKE_SECONDS if here * torch.get_num_threads() <= len(AVAILABLE) else 0.0
    return PeerToPeerAllReduce(rank, sockets, timeout, here == size, awake)


def _reach(address: tuple[str, int], key: bytes, rank: int, peer: int, until: float) -> socket.socket:
    """Return a mutually authenticated connection to another rank. Raise OSError if there is none by ``until``."""
    while True:
        connection = prepare_socket(open_connection(address, until - time.monotonic()), None, server_side=False)
        link = FramedSocket(peer, connection)
        try:
            run_flows([(link, authenticate_to_listener(link, key, str(rank), str(peer)))], 0.0, until)
            return connection
        except PeerError as error:
            connection.close()
            dropped = isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, AuthenticationError)
            if not dropped or time.monotonic() + RETRY_SECONDS >= until:
                raise OSError(f"rank {peer}: {error}") from error
        time.sleep(RETRY_SECONDS)


def _welcome(
    guest: FramedSocket, key: bytes, rank: int, size: int, sockets: Mapping[int, socket.socket]
) -> Generator[int, None, int]:
    """Return the proven rank of the caller."""
    guest.connection = prepare_socket(guest.connection, None, server_side=True)
    who = parse_rank((yield from authenticate_caller(guest, key, str(rank))), size)
    if who <= rank or who in sockets:
        raise AuthenticationError(f"rank {who} is not expected")
    return who
