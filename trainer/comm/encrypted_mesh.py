"""`EncryptedMesh`: collectives over TLS connections between all ranks, where gloo would go over a network in clear.

An all-reduce of few bytes is one exchange; of more, each rank adds up one part in order of rank and passes it on, piece
by piece, so that sums leave while other pieces still come. A rank sends and receives 2 (n - 1) / n times the tensor, as
in a ring, and all ranks get the same bits. Every rank has a connection to every other one, in large worlds too: one
thread serves them all, and a sum of few bytes costs each rank some 10 microseconds for each peer.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trainer.comm.framed_socket import Flow, check_announced_size, parse_json_of_peer, view_bytes
from trainer.comm.mesh_links import AGAIN, TURN_BYTES, WAIT, MeshLink, run_flows
from trainer.comm.peer_to_peer import NEAR_BYTES, UNSHARED
from trainer.comm.tls import TLSContexts

SMALL_BYTES = 1 << 16
"""The most bytes that a rank sends in one exchange with several others; with one other: `NEAR_BYTES`."""
BLOCK_BYTES = 1 << 26
"""The most bytes of a tensor that are summed at a time: the parts of all peers are in memory then."""
_SUM, _COPY, _ROWS, _OBJECT, _BARRIER, _MESSAGE = b"S", b"C", b"R", b"O", b"B", b"M"
"""The codes of operations."""

LinkFlow = tuple[MeshLink, Generator[int, None, Any]]


class EncryptedMesh:
    """One rank's end: a `trainer.comm.torch_transport.Transport` with the verbs of gloo's. All ranks must call the same
    operations in the same order, on one thread at a time.

    ``timeout``: seconds of silence during an operation that count as a failure. A failure raises
    `trainer.comm.framed_socket.PeerError`; the mesh cannot be used again, and the content of the operation's tensor is
    undefined. Any operation ends at once after `interrupt`, and when a peer dies.
    """

    linger_seconds = 0.0

    def __init__(self, rank: int, links: Mapping[int, MeshLink], contexts: TLSContexts, timeout: float) -> None:
        """Use ``links``, one to each other rank, by rank. ``contexts``: with which their keys are renewed."""
        self.rank, self.size, self.timeout = rank, len(links) + 1, timeout
        self._links, self._contexts = dict(links), contexts
        self._small = (NEAR_BYTES if self.size == 2 else SMALL_BYTES) // len(links)
        self._spare = torch.empty(0, dtype=torch.uint8)
        self._called_off, self._call_off = socket.socketpair()
        self._call_off.setblocking(False)  # nobody takes out what is put in

    def takes_at_once(self, tensor: Tensor) -> bool:
        return tensor.nbytes <= self._small and not tensor.is_cuda

    def interrupt(self) -> None:
        """Make present and later operations fail at once, unless all data has arrived already. Any thread may call it;
        peers are not told."""
        with contextlib.suppress(OSError):
            self._call_off.send(b"!")

    def abort(self) -> None:
        self.interrupt()
        for link in self._links.values():
            link.shut()

    def close(self) -> None:
        for link in self._links.values():
            link.connection.close()
        self._called_off.close()
        self._call_off.close()

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over ranks, in place: in order of rank, with the same bits on all of them."""
        self._on_host(tensor, lambda flat: self._all_reduce(flat, range(self.size)))

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

        self._on_host(tensor, carry_out)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy the tensor of rank ``source`` to all ranks, in place."""
        self._on_host(tensor, lambda flat: self._copy(flat, source, range(self.size)))

    def all_to_all(self, output: Tensor, input_: Tensor) -> None:
        """Exchange rows: row j of ``input_`` goes to rank j, and row i of ``output`` comes from rank i."""
        output[self.rank].copy_(input_[self.rank])
        self._exchange_rows([view_bytes(row.reshape(-1)) for row in input_], [_row(output, i) for i in self._ranks])

    def all_gather(self, output: Tensor, input_: Tensor) -> None:
        """Gather rows: row i of ``output`` is the ``input_`` of rank i."""
        output[self.rank].view(-1).copy_(input_.reshape(-1))
        mine = view_bytes(input_.reshape(-1))
        self._exchange_rows([mine] * self.size, [_row(output, i) for i in self._ranks])

    def gather_among(self, output: Tensor, mine: Tensor, ranks: Sequence[int]) -> None:
        """Gather rows of these ranks, of which this is one: the part of ``output`` at a rank's place among them is its
        ``mine``. All parts have the same size."""
        target, row = output.detach().view(len(ranks), -1), mine.detach().cpu().view(-1)
        table = torch.empty_like(target, device="cpu") if target.is_cuda else target
        table[ranks.index(self.rank)].copy_(row)
        sent, flows = view_bytes(row), list[LinkFlow]()
        for place, peer in enumerate(ranks):
            if peer != self.rank:
                link = self._links[peer]
                flows += [(link, _receive(link, _ROWS, _row(table, place))), (link, _send(link, _ROWS, sent))]
        self._run(flows)
        if table is not target:
            target.copy_(table)

    def scatter_sum(self, output: Tensor, given: Tensor, ranks: Sequence[int]) -> None:
        """Sum tensors over these ranks, of which this is one, in order of rank, and put the part at this rank's place
        among them into ``output``. The content of ``given`` is undefined afterwards."""
        place = ranks.index(self.rank)
        parts = given.detach().cpu().view(len(ranks), -1)
        peers = [(other, rank) for other, rank in enumerate(ranks) if rank != self.rank]
        step = max(1, BLOCK_BYTES // (len(ranks) * parts.element_size()))
        for begin in range(0, parts.shape[1], step):
            own = parts[place, begin : begin + step]
            theirs = {rank: buffer for (_, rank), buffer in zip(peers, self._buffers(own, len(peers)), strict=True)}
            flows: list[LinkFlow] = []
            for other, rank in peers:
                link, going = self._links[rank], parts[other, begin : begin + step]
                flows += [(link, _receive(link, _SUM, view_bytes(theirs[rank])))]
                flows += [(link, _send(link, _SUM, view_bytes(going)))]
            self._run(flows)
            _add_up(own, [theirs.get(rank, own) for rank in ranks])
        output.detach().view(-1).copy_(parts[place])

    def sum_among(self, tensor: Tensor, ranks: Sequence[int]) -> None:
        """Sum over these ranks, of which this is one, in place, with the same bits on all of them."""
        self._on_host(tensor, lambda flat: self._all_reduce(flat, ranks))

    def all_gather_object(self, value: Any) -> list[Any]:
        mine, texts = json.dumps(value).encode(), dict[int, bytearray]()

        def receive(link: MeshLink) -> Flow:
            size = check_announced_size(link.peer, (yield from link.expect(_OBJECT, None)))
            texts[link.peer] = bytearray(size)
            yield from link.read(memoryview(texts[link.peer]))

        links = self._links.values()
        self._run([*((link, receive(link)) for link in links), *((link, _send(link, _OBJECT, mine)) for link in links)])
        values = {peer: parse_json_of_peer(peer, raw) for peer, raw in texts.items()}
        values[self.rank] = json.loads(mine)
        return [values[rank] for rank in self._ranks]

    def send(self, tensor: Tensor, target: int) -> None:
        """Send a tensor to rank ``target``."""
        link = self._links[target]
        self._run([(link, _send(link, _MESSAGE, view_bytes(tensor.detach().reshape(-1))))])

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receive into a contiguous tensor what rank ``source`` sends."""
        link = self._links[source]
        self._run([(link, _receive(link, _MESSAGE, view_bytes(tensor.detach().view(-1))))])

    def barrier(self, seconds: float) -> None:
        links = self._links.values()
        flows = [
            *((link, _receive(link, _BARRIER)) for link in links),
            *((link, _send(link, _BARRIER)) for link in links),
        ]
        self._run(flows, time.monotonic() + seconds)

    @property
    def _ranks(self) -> range:
        return range(self.size)

    def _on_host(self, tensor: Tensor, carry_out: Callable[[Tensor], None]) -> None:
        """Carry out an operation on the tensor's content as one row in this host's memory, then put it back."""
        target = tensor.detach()
        host = target.cpu().contiguous()
        carry_out(host.view(-1))
        if host is not target:
            target.copy_(host)

    def _run(self, flows: Sequence[LinkFlow], until: float | None = None) -> None:
        due = [link for link in dict.fromkeys(link for link, _ in flows) if link.is_due]
        if due:
            run_flows([(link, link.renew(self._contexts)) for link in due], self._called_off, self.timeout)
        run_flows(flows, self._called_off, self.timeout, until)

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
        peers, mine = [rank for rank in ranks if rank != self.rank], view_bytes(flat)
        theirs = dict(zip(peers, self._buffers(flat, len(peers)), strict=True))
        links = {peer: self._links[peer] for peer in peers}
        self._run(
            [
                *((link, _receive(link, _SUM, view_bytes(theirs[peer]))) for peer, link in links.items()),
                *((link, _send(link, _SUM, mine)) for link in links.values()),
            ]
        )
        _add_up(flat, [theirs.get(rank, flat) for rank in ranks])

    def _sum_in_parts(self, flat: Tensor, ranks: Sequence[int]) -> None:
        """Add up this rank's part of the tensor and pass it on, while the other parts come."""
        parts = dict(zip(ranks, _cut(flat, len(ranks)), strict=True))
        mine = parts[self.rank]
        peers = [rank for rank in ranks if rank != self.rank]
        pieces = _pieces(mine)
        theirs = {peer: _pieces(buffer) for peer, buffer in zip(peers, self._buffers(mine, len(peers)), strict=True)}
        missing = [len(peers)] * len(pieces)
        size = flat.nbytes

        def receive(link: MeshLink) -> Flow:
            """What is to be added to this rank's part, then the sum of the peer's part."""
            yield from link.expect(_SUM, size)
            for place, piece in enumerate(theirs[link.peer]):
                yield from link.read(view_bytes(piece))
                missing[place] -= 1
                if not missing[place]:
                    ordered = [pieces[place] if rank == self.rank else theirs[rank][place] for rank in ranks]
                    _add_up(pieces[place], ordered)
            yield from link.read(view_bytes(parts[link.peer]))

        def send(link: MeshLink) -> Flow:
            yield from link.write(link.head(_SUM, size))
            yield from link.write([view_bytes(parts[link.peer])])
            for place, piece in enumerate(pieces):
                while missing[place]:
                    yield WAIT
                yield from link.write([view_bytes(piece)])

        links = [self._links[peer] for peer in peers]
        self._run([*((link, receive(link)) for link in links), *((link, send(link)) for link in links)])

    def _reduce(self, flat: Tensor, ranks: Sequence[int]) -> None:
        """Sum over these ranks at the first of them."""
        first, *rest = ranks
        if self.rank != first:
            link = self._links[first]
            self._run([(link, _send(link, _SUM, view_bytes(flat)))])
            return
        for peer in rest:  # one after the other, in order of rank
            [buffer] = self._buffers(flat, 1)
            self._run([(self._links[peer], _receive(self._links[peer], _SUM, view_bytes(buffer)))])
            _add_up(flat, [flat, buffer])

    def _copy(self, flat: Tensor, source: int, ranks: Sequence[int]) -> None:
        """Copy the tensor of ``source`` to these ranks. Where it is large, it sends each of them one part, which that
        rank passes on: each link carries it about once then."""
        others = [rank for rank in ranks if rank != source]
        whole = view_bytes(flat)
        if len(others) < 2 or flat.nbytes <= SMALL_BYTES:
            links = [self._links[rank] for rank in others] if self.rank == source else [self._links[source]]
            if self.rank == source:
                self._run([(link, _send(link, _COPY, whole)) for link in links])
            else:
                self._run([(link, _receive(link, _COPY, whole)) for link in links])
            return
        parts = dict(zip(others, map(view_bytes, _cut(flat, len(others))), strict=True))
        if self.rank == source:
            self._run([(self._links[rank], _send(self._links[rank], _COPY, part)) for rank, part in parts.items()])
            return
        mine, arrived = parts[self.rank], [0]
        origin = self._links[source]

        def receive_own() -> Flow:
            yield from origin.expect(_COPY, len(mine))
            for at in range(0, len(mine), TURN_BYTES):
                yield from origin.read(mine[at : at + TURN_BYTES])
                arrived[0] = min(at + TURN_BYTES, len(mine))
                yield AGAIN

        def pass_on(link: MeshLink) -> Flow:
            yield from link.write(link.head(_COPY, len(mine)))
            for at in range(0, len(mine), TURN_BYTES):
                while arrived[0] < min(at + TURN_BYTES, len(mine)):
                    yield WAIT
                yield from link.write([mine[at : at + TURN_BYTES]])

        links = [self._links[rank] for rank in others if rank != self.rank]
        self._run(
            [
                (origin, receive_own()),
                *((link, _receive(link, _COPY, parts[link.peer])) for link in links),
                *((link, pass_on(link)) for link in links),
            ]
        )

    def _exchange_rows(self, going: Sequence[memoryview], coming: Sequence[memoryview]) -> None:
        links = self._links.values()
        self._run(
            [
                *((link, _receive(link, _ROWS, coming[link.peer])) for link in links),
                *((link, _send(link, _ROWS, going[link.peer])) for link in links),
            ]
        )

    def _buffers(self, like: Tensor, count: int) -> Sequence[Tensor]:
        """Return tensors of the type and size of ``like``. They share memory with those of the call before."""
        bytes_ = -(-like.nbytes // 64) * 64  # aligned
        if len(self._spare) < bytes_ * count:
            self._spare = torch.empty(bytes_ * count, dtype=torch.uint8)
        return [self._spare[place * bytes_ : place * bytes_ + like.nbytes].view(like.dtype) for place in range(count)]


def _send(link: MeshLink, code: bytes, data: memoryview | bytes = b"") -> Flow:
    view = memoryview(data)
    yield from link.write(link.head(code, len(view), [view]))


def _receive(link: MeshLink, code: bytes, into: memoryview | None = None) -> Flow:
    yield from link.expect(code, len(into) if into is not None else 0)
    if into is not None:
        yield from link.read(into)


def _add_up(into: Tensor, ordered: Sequence[Tensor]) -> None:
    """Put the sum of tensors, of which ``into`` is one, into it: in this order, so that rounding is the same on all
    ranks. On this thread alone: see `trainer.comm.peer_to_peer.UNSHARED`."""
    for target, total, *rest in zip(into.split(UNSHARED), *(one.split(UNSHARED) for one in ordered), strict=True):
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
