"""Collectives over channels of our own (`trainer.comm.channel`): what all groups have, and `MeshGroup`.

A mesh takes gloo's place where traffic has to be encrypted, and beside gloo it sums what is small on the CPUs: the
training thread does all of it, where gloo would wake two threads of each rank, one after the other.

An all-reduce of few bytes is one exchange; of more, each rank adds up one part in order of rank and passes it
on, piece by piece, so that sums leave while other pieces still come. A rank sends and receives 2 (n - 1) / n times the
tensor, as in a ring, and all ranks get the same bits.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.channel import (
    AGAIN,
    HEAD_BYTES,
    TURN_BYTES,
    WAIT,
    Channel,
    Flow,
    PeerError,
    connect,
    parse_json_of_peer,
    run_flows,
    view_bytes,
)
from trainer.comm.listener import BACKLOG, Door, admit_ranks, check_rank

if TYPE_CHECKING:
    from trainer.comm.tls import TLSContexts

NEAR_BYTES, FAR_BYTES = 1 << 20, 16 << 10
"""The most bytes that a rank sends for a sum beside gloo: the first within one host and between two ranks, where a ring
would not send less; the second otherwise."""
SMALL_BYTES = 1 << 16
"""The most bytes that a rank sends in one exchange with several others; with one other: `NEAR_BYTES`."""
_PAD_BYTES = 64
"""Before the data of a small message, for its head: data stay aligned."""
BLOCK_BYTES = 1 << 26
"""The most bytes of a tensor that are summed at a time: the parts of all peers are in memory then."""
UNSHARED = 32768
"""The numbers that torch adds up on one thread, however many threads it has: on the communication thread, more would
start a second pool of threads, which takes cores from the step."""
BROADCAST, GATHER, _ROWS, _BARRIER, _MESSAGE = b"broadcast", b"gather", b"rows", b"barrier", b"message"
"""The codes of operations, besides those of sums (`sum_code`)."""

Flows = list[tuple[Channel, Generator[int, None, Any]]]


class SocketGroup:
    """One rank's end. All ranks must call the same operations in the same order, on one thread at a time.

    ``timeout``: seconds of silence during an operation that count as a failure. A failure raises
    `trainer.comm.channel.PeerError`; the group cannot be used again, and the content of the operation's tensor is
    undefined. Any operation ends at once after `interrupt`, and when a peer dies.
    """

    linger_seconds = 0.0

    def __init__(
        self, rank: int, channels: Mapping[int, Channel], size: int, timeout: float, awake_seconds: float = 0.0
    ) -> None:
        """Use ``channels``, by the rank at their other end. ``awake_seconds``: for which a waiting rank polls."""
        self.rank, self.size, self.timeout = rank, size, timeout
        self._channels = {peer: channels[peer] for peer in sorted(channels)}
        self._awake_seconds = awake_seconds
        self._spare = torch.empty(0, dtype=torch.uint8)
        self._called_off, self._call_off = socket.socketpair()
        self._call_off.setblocking(False)  # nobody takes out what is put in
        self._is_closed = False

    def interrupt(self) -> None:
        """Make present and later operations fail at once, unless all data has arrived already. Any thread may call it;
        peers are not told."""
        with contextlib.suppress(OSError):
            self._call_off.send(b"!")

    def abort(self) -> None:
        self.interrupt()
        for channel in self._channels.values():
            channel.shut()

    def close(self) -> None:
        self._is_closed = True
        for channel in self._channels.values():
            channel.close()
        self._called_off.close()
        self._call_off.close()

    def _run(self, flows: Flows, until: float | None = None, silence: float | None = None) -> None:
        if self._is_closed:
            raise PeerError(None, "the group has been closed")
        silence = self.timeout if silence is None else silence
        run_flows(flows, silence, until, self._called_off, self._awake_seconds)

    def _with_all(self, make: Callable[[Channel], Generator[int, None, Any]]) -> Flows:
        return [(channel, make(channel)) for channel in self._channels.values()]

    def _buffers(self, like: Tensor, peers: Collection[int]) -> dict[int, Tensor]:
        """Return a tensor of the type and size of ``like`` for each peer. They share memory with those of the call
        before."""
        bytes_ = -(-like.nbytes // 64) * 64  # aligned
        if len(self._spare) < bytes_ * len(peers):
            self._spare = torch.empty(bytes_ * len(peers), dtype=torch.uint8)
        places = ((peer, place * bytes_) for place, peer in enumerate(peers))
        return {peer: self._spare[at : at + like.nbytes].view(like.dtype) for peer, at in places}


class MeshGroup(SocketGroup):
    """A group with a channel between each two ranks: a `trainer.comm.torch_transport.Transport` with the verbs of
    gloo's."""

    def __init__(
        self,
        rank: int,
        channels: Mapping[int, Channel],
        timeout: float,
        small: int | None = None,
        awake_seconds: float = 0.0,
    ) -> None:
        """``small``: the most bytes that a rank sends for a sum in one exchange."""
        super().__init__(rank, channels, len(channels) + 1, timeout, awake_seconds)
        small = (NEAR_BYTES if self.size == 2 else SMALL_BYTES) if small is None else small
        self._small = small // max(1, len(channels))
        self._small_buffers: dict[Any, tuple[dict[int, Tensor], dict[int, memoryview]]] = {}

    def takes_at_once(self, tensor: Tensor) -> bool:
        return tensor.nbytes <= self._small and not tensor.is_cuda

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over ranks, in place: in order of rank, with the same bits on all of them."""
        self.sum_among(tensor, range(self.size))

    def sum_among(self, tensor: Tensor, ranks: Sequence[int]) -> None:
        """Sum over these ranks, of which this is one, in place, with the same bits on all of them."""
        on_host(tensor, lambda flat: self._all_reduce(flat, ranks))

    def hierarchical_all_reduce(self, tensor: Tensor, nodes: Sequence[int]) -> None:
        """Sum over ranks, in place: within each node, then between one rank of each, then back. ``nodes``: the node of
        each rank."""
        mine = [rank for rank, node in enumerate(nodes) if node == nodes[self.rank]]
        firsts = [nodes.index(node) for node in sorted(set(nodes))]

        def carry_out(flat: Tensor) -> None:
            self._reduce(flat, mine)
            if self.rank == mine[0]:
                self._all_reduce(flat, firsts)
            self._copy(flat, mine[0], mine)

        on_host(tensor, carry_out)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy the tensor of rank ``source`` to all ranks, in place."""
        on_host(tensor, lambda flat: self._copy(flat, source, range(self.size)))

    def all_to_all(self, output: Tensor, input_: Tensor) -> None:
        """Exchange rows: row j of ``input_`` goes to rank j, and row i of ``output`` comes from rank i."""
        output[self.rank].copy_(input_[self.rank])
        going = [view_bytes(row.reshape(-1)) for row in input_]
        self._exchange(_ROWS, {peer: (going[peer], _row(output, peer)) for peer in self._channels})

    def all_gather(self, output: Tensor, input_: Tensor) -> None:
        """Gather rows: row i of ``output`` is the ``input_`` of rank i."""
        self.gather_among(output, input_, range(self.size))

    def gather_among(self, output: Tensor, mine: Tensor, ranks: Sequence[int]) -> None:
        """Gather rows of these ranks, of which this is one: the part of ``output`` at a rank's place among them is its
        ``mine``. All parts have the same size."""
        target, row = output.detach().view(len(ranks), -1), mine.detach().cpu().reshape(-1)
        table = torch.empty_like(target, device="cpu") if target.is_cuda else target
        table[ranks.index(self.rank)].copy_(row)
        sent = view_bytes(row)
        peers = {peer: place for place, peer in enumerate(ranks) if peer != self.rank}
        self._exchange(_ROWS, {peer: (sent, _row(table, place)) for peer, place in peers.items()})
        if table is not target:
            target.copy_(table)

    def scatter_sum(self, output: Tensor, given: Tensor, ranks: Sequence[int]) -> None:
        """Sum tensors over these ranks, of which this is one, in order of rank, and put the part at this rank's place
        among them into ``output``. The content of ``given`` is undefined afterwards."""
        parts = given.detach().cpu().view(len(ranks), -1)
        mine = parts[ranks.index(self.rank)]
        peers = {peer: place for place, peer in enumerate(ranks) if peer != self.rank}
        step = max(1, BLOCK_BYTES // (len(ranks) * parts.element_size()))
        for begin in range(0, parts.shape[1], step):
            own = mine[begin : begin + step]
            theirs = self._buffers(own, peers)
            self._exchange(
                sum_code(own),
                {
                    peer: (view_bytes(parts[place, begin : begin + step]), view_bytes(theirs[peer]))
                    for peer, place in peers.items()
                },
            )
            add_up(own, [theirs.get(rank, own) for rank in ranks])
        output.detach().view(-1).copy_(mine)

    def all_gather_object(self, value: Any) -> list[Any]:
        texts = {self.rank: bytearray(json.dumps(value).encode())}

        def receive(channel: Channel) -> Flow:
            texts[channel.peer] = yield from channel.receive(GATHER)

        mine = texts[self.rank]
        self._run(self._with_all(receive) + self._with_all(lambda channel: channel.send(GATHER, mine)))
        return [parse_json_of_peer(rank, texts[rank]) for rank in range(self.size)]

    def send(self, tensor: Tensor, target: int) -> None:
        """Send a tensor to rank ``target``."""
        channel = self._channels[target]
        self._run([(channel, channel.send(_MESSAGE, view_bytes(tensor.detach().reshape(-1))))])

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receive into a contiguous tensor what rank ``source`` sends."""
        channel = self._channels[source]
        self._run([(channel, receive_into(channel, _MESSAGE, view_bytes(tensor.detach().view(-1))))])

    def barrier(self, seconds: float) -> None:
        coming = self._with_all(lambda channel: channel.expect(_BARRIER, 0))
        self._run(coming + self._with_all(lambda channel: channel.send(_BARRIER)), time.monotonic() + seconds)

    def _exchange(self, code: bytes, data: Mapping[int, tuple[memoryview, memoryview]]) -> None:
        """Send each of these ranks the first, and receive the second from it."""
        ends = [(self._channels[peer], sent, into) for peer, (sent, into) in data.items()]
        coming: Flows = [(channel, receive_into(channel, code, into)) for channel, _, into in ends]
        self._run(coming + [(channel, channel.send(code, sent)) for channel, sent, _ in ends])

    def _all_reduce(self, flat: Tensor, ranks: Sequence[int]) -> None:
        """Sum over these ranks, of which this is one."""
        if len(ranks) == 1:
            return
        if flat.nbytes <= (self._small if len(ranks) == self.size else SMALL_BYTES // (len(ranks) - 1)):
            return self._sum_at_once(flat, ranks)
        for block in flat.split(BLOCK_BYTES // flat.element_size()):
            self._sum_in_parts(block, ranks)

    def _sum_at_once(self, flat: Tensor, ranks: Sequence[int]) -> None:
        """Send the whole to each rank, and add up what comes."""
        peers = [rank for rank in ranks if rank != self.rank]
        theirs, into = self._buffers_with_heads(flat, peers)
        code, mine = sum_code(flat), view_bytes(flat)
        self._run([(channel := self._channels[peer], channel.exchange(code, mine, into[peer])) for peer in peers])
        add_up(flat, [theirs.get(rank, flat) for rank in ranks])

    def _buffers_with_heads(
        self, like: Tensor, peers: Sequence[int]
    ) -> tuple[dict[int, Tensor], dict[int, memoryview]]:
        """Return a tensor of the type and size of ``like`` for each peer, and its memory with the head of a message
        before it. Sums of few sizes come again and again, so these are kept."""
        key = like.nbytes, like.dtype, tuple(peers)
        if key not in self._small_buffers:
            if len(self._small_buffers) > 8:
                self._small_buffers.clear()
            raw = {peer: torch.empty(_PAD_BYTES + like.nbytes, dtype=torch.uint8) for peer in peers}
            self._small_buffers[key] = (
                {peer: one[_PAD_BYTES:].view(like.dtype) for peer, one in raw.items()},
                {peer: view_bytes(one)[_PAD_BYTES - HEAD_BYTES :] for peer, one in raw.items()},
            )
        return self._small_buffers[key]

    def _sum_in_parts(self, flat: Tensor, ranks: Sequence[int]) -> None:
        """Add up this rank's part of the tensor and pass it on, while the other parts come."""
        parts = dict(zip(ranks, _cut(flat, len(ranks)), strict=True))
        mine = parts[self.rank]
        peers = [rank for rank in ranks if rank != self.rank]
        pieces = _pieces(mine)
        theirs = {peer: _pieces(buffer) for peer, buffer in self._buffers(mine, peers).items()}
        missing = [len(peers)] * len(pieces)
        code, size = sum_code(flat), flat.nbytes

        def receive(channel: Channel) -> Flow:
            """What is to be added to this rank's part, then the sum of the peer's part."""
            yield from channel.expect(code, size)
            for place, piece in enumerate(theirs[channel.peer]):
                yield from channel.read(view_bytes(piece))
                missing[place] -= 1
                if not missing[place]:
                    ordered = [pieces[place] if rank == self.rank else theirs[rank][place] for rank in ranks]
                    add_up(pieces[place], ordered)
            yield from channel.read(view_bytes(parts[channel.peer]))

        def send(channel: Channel) -> Flow:
            yield from channel.send(code, view_bytes(parts[channel.peer]), size=size)
            for place, piece in enumerate(pieces):
                while missing[place]:
                    yield WAIT
                yield from channel.write(view_bytes(piece))

        channels = [self._channels[peer] for peer in peers]
        coming: Flows = [(channel, receive(channel)) for channel in channels]
        self._run(coming + [(channel, send(channel)) for channel in channels])

    def _reduce(self, flat: Tensor, ranks: Sequence[int]) -> None:
        """Sum over these ranks at the first of them."""
        first, *rest = ranks
        code = sum_code(flat)
        if self.rank != first:
            channel = self._channels[first]
            self._run([(channel, channel.send(code, view_bytes(flat)))])
            return
        for peer in rest:  # one after the other, in order of rank
            buffer = self._buffers(flat, [peer])[peer]
            self._run([(self._channels[peer], receive_into(self._channels[peer], code, view_bytes(buffer)))])
            add_up(flat, [flat, buffer])

    def _copy(self, flat: Tensor, source: int, ranks: Sequence[int]) -> None:
        """Copy the tensor of ``source`` to these ranks. Where it is large, it sends each of them one part, which that
        rank passes on: each link carries it about once then."""
        others = [rank for rank in ranks if rank != source]
        whole = view_bytes(flat)
        is_whole = len(others) < 2 or flat.nbytes <= SMALL_BYTES
        parts = dict.fromkeys(others, whole)
        if not is_whole:
            parts = dict(zip(others, map(view_bytes, _cut(flat, len(others))), strict=True))
        if self.rank == source:
            targets = [(self._channels[rank], part) for rank, part in parts.items()]
            return self._run([(channel, channel.send(BROADCAST, part)) for channel, part in targets])
        origin, mine, arrived = self._channels[source], parts[self.rank], 0
        if is_whole:
            self._run([(origin, receive_into(origin, BROADCAST, mine))])
            return

        def receive_own() -> Flow:
            nonlocal arrived
            yield from origin.expect(BROADCAST, len(mine))
            for at in range(0, len(mine), TURN_BYTES):
                yield from origin.read(mine[at : at + TURN_BYTES])
                arrived = min(at + TURN_BYTES, len(mine))
                yield AGAIN

        def pass_on(channel: Channel) -> Flow:
            yield from channel.send(BROADCAST, size=len(mine))
            for at in range(0, len(mine), TURN_BYTES):
                while arrived < min(at + TURN_BYTES, len(mine)):
                    yield WAIT
                yield from channel.write(mine[at : at + TURN_BYTES])

        channels = [self._channels[rank] for rank in others if rank != self.rank]
        coming: Flows = [(channel, receive_into(channel, BROADCAST, parts[channel.peer])) for channel in channels]
        self._run([(origin, receive_own()), *coming, *((channel, pass_on(channel)) for channel in channels)])


def exchange_places(store: dist.Store, rank: int, size: int, host: str) -> tuple[socket.socket, list[tuple[str, int]]]:
    """Return a listening socket of this rank, and the host and port of each rank's. They are exchanged through
    ``store``, which no other group uses. Raise OSError if a rank cannot listen."""
    place = listener = None
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        place = host, listener.getsockname()[1]
    finally:
        store.set(str(rank), json.dumps(place))  # others wait for it, whatever it is
    try:
        places = [json.loads(store.get(str(peer))) for peer in range(size)]
        if None in places:
            raise OSError(f"rank {places.index(None)} does not listen at any address")
    except BaseException:
        listener.close()
        raise
    return listener, [(address, port) for address, port in places]


def connect_mesh(
    places: Sequence[tuple[str, int]],
    rank: int,
    listener: socket.socket,
    key: bytes,
    seconds: float,
    tls: TLSContexts | None = None,
) -> dict[int, Channel]:
    """Return this rank's channels to all others, by rank, once all have come. Each rank connects to the ranks below it.

    ``places``: the host and port at which each rank listens; ``listener``: this rank's socket there, which is closed.
    ``key``: the key that only these ranks have. Raise OSError, which says who was turned away, if at least one rank
    does not succeed in so many ``seconds``."""
    until, size = time.monotonic() + seconds, len(places)
    channels: dict[int, Channel] = {}
    door: Door[int] = Door(listener, key, str(rank), lambda name: check_rank(name, size, channels, above=rank), tls)
    try:
        for peer, place in enumerate(places[:rank]):
            channels[peer] = connect(place, key, str(rank), str(peer), tls, until, peer, waits=False)
        admit_ranks(door, channels, size - 1, until)
    except BaseException as error:
        for channel in channels.values():
            channel.close()
        if isinstance(error, TimeoutError):
            late = [peer for peer in range(size) if peer != rank and peer not in channels]
            message = "; ".join([f"ranks {late} did not connect within {seconds:g} s", *door.refused[-3:]])
            raise TimeoutError(message) from error
        raise
    finally:
        listener.close()
    return {peer: channels[peer] for peer in sorted(channels)}


def on_host(tensor: Tensor, carry_out: Callable[[Tensor], None]) -> None:
    """Carry out an operation on the tensor's content as one row in this host's memory, then put it back."""
    target = tensor.detach()
    host = target.cpu().contiguous()
    carry_out(host.view(-1))
    if host is not target:
        target.copy_(host)


def sum_code(flat: Tensor) -> bytes:
    return f"sum {flat.dtype}".replace("torch.", "").encode()


def receive_into(channel: Channel, code: bytes, into: memoryview) -> Flow:
    yield from channel.expect(code, len(into))
    yield from channel.read(into)


def add_up(into: Tensor, ordered: Sequence[Tensor]) -> None:
    """Put the sum of tensors, of which ``into`` is one, into it: in this order, so that rounding is the same on all
    ranks. On this thread alone: see `UNSHARED`."""
    rows = [into, *ordered]
    parts = [rows] if len(into) <= UNSHARED else zip(*(one.split(UNSHARED) for one in rows), strict=True)
    for target, total, *rest in parts:
        for part in rest:
            total += part
        if total.data_ptr() != target.data_ptr():
            target.copy_(total)


def _cut(flat: Tensor, count: int) -> Sequence[Tensor]:
    """Return the tensor in ``count`` parts of nearly the same size."""
    places = [len(flat) * number // count for number in range(count + 1)]
    return [flat[begin:end] for begin, end in pairwise(places)]


def _pieces(part: Tensor) -> Sequence[Tensor]:
    return part.split(TURN_BYTES // part.element_size()) if len(part) else ()


def _row(table: Tensor, number: int) -> memoryview:
    return view_bytes(table[number].view(-1))
