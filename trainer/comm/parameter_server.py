"""Parameter-server mode: the collectives of a generation over a server, rank 0.

It needs only a connection from each rank to rank 0, so it works where links between other ranks are cut, or where gloo
or NCCL fail. It is slower than all-reduce: all gradients go through one host.

A worker announces its operation and sends its data while sums come back. The server receives from all workers while it
sends to all of them.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from trainer.comm.channel import Channel, Flow, PeerError, connect, parse_json_of_peer, run_flows, view_bytes
from trainer.comm.listener import Door, admit_ranks, check_rank
from trainer.comm.socket_group import (
    BROADCAST,
    GATHER,
    Flows,
    SocketGroup,
    add_up,
    on_host,
    receive_into,
    sum_code,
)
from trainer.comm.tls import TLSContexts

PART_BYTES = 1 << 20
"""The bytes that the server adds up, and passes on, at a time."""
TELL_SECONDS = 1.0
"""The seconds for which the server tries to tell the workers why it fails."""
SERVER = "server"


class ParameterServerGroup(SocketGroup):
    """One rank's end: rank 0 has a channel to each other rank, which has one to rank 0. It has the operations of a
    `trainer.comm.torch_transport.Transport` alone.

    All ranks have to start an operation within ``timeout`` seconds. The server tells the others why an operation fails,
    so that none of them waits for it or blames it."""

    @classmethod
    def serve(
        cls, listener: socket.socket, size: int, key: bytes, timeout: float, tls: TLSContexts | None = None
    ) -> ParameterServerGroup:
        """Return rank 0's end once all others have connected to ``listener``, which is then closed. Raise `PeerError`
        if they do not come in time."""
        channels: dict[int, Channel] = {}
        door: Door[int] = Door(listener, key, SERVER, lambda name: check_rank(name, size, channels, above=0), tls)
        try:
            with listener:
                admit_ranks(door, channels, size - 1, time.monotonic() + timeout)
        except OSError as error:
            late = [rank for rank in range(1, size) if rank not in channels]
            why = f"within {timeout:g} s" if isinstance(error, TimeoutError) else f"before it failed: {error}"
            lost = PeerError(
                late[0], "; ".join([f"ranks {late} did not connect to the server {why}", *door.refused[-3:]])
            )
            cls(0, channels, size, timeout)._end(lost)
            raise lost from error
        return cls(0, channels, size, timeout)

    @classmethod
    def connect_worker(
        cls, address: tuple[str, int], rank: int, size: int, key: bytes, timeout: float, tls: TLSContexts | None = None
    ) -> ParameterServerGroup:
        """Return a worker's end, connected to the server; retry for ``timeout`` if it is absent or overloaded."""
        try:
            channel = connect(address, key, str(rank), SERVER, tls, time.monotonic() + timeout)
            return cls(rank, {0: channel}, size, timeout)
        except OSError as error:
            raise PeerError(0, f"rank 0, the server: {error}") from error

    def takes_at_once(self, tensor: Tensor) -> bool:
        return False

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over ranks, in place: in order of rank, so that the bits do not depend on the order of arrival."""
        with self._telling():
            on_host(tensor, self._sum)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        if source:
            if self.rank != source:
                tensor.detach().zero_()
            return self.all_reduce(tensor)  # the others add zeros
        with self._telling():
            on_host(tensor, self._share)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._gather(value, self.timeout)

    def barrier(self, seconds: float) -> None:
        self._gather(None, seconds)

    def _sum(self, flat: Tensor) -> None:
        code, parts = sum_code(flat), _parts(flat)
        if self.rank:
            # The sum overwrites its part, which has left by then: the server needs all of it to add it up.
            return self._ask(lambda server: server.send(code, view_bytes(flat)), code, parts)
        self._begin(code, flat.nbytes)
        theirs = self._buffers(parts[0], self._channels) if parts else {}
        going: Flows = []
        for part in parts:
            buffers = {rank: buffer[: len(part)] for rank, buffer in theirs.items()}
            coming = [(channel, channel.read(view_bytes(buffers[rank]))) for rank, channel in self._channels.items()]
            self._run(going + coming)
            add_up(part, [part, *buffers.values()])
            going = [(channel, channel.send(code, view_bytes(part))) for channel in self._channels.values()]
        self._run(going)

    def _share(self, flat: Tensor) -> None:
        parts = _parts(flat)
        if self.rank:
            return self._ask(lambda server: server.send(BROADCAST, size=flat.nbytes), BROADCAST, parts)
        self._begin(BROADCAST, flat.nbytes)

        def send(channel: Channel) -> Flow:
            for part in parts:
                yield from channel.send(BROADCAST, view_bytes(part))

        self._run(self._with_all(send))

    def _gather(self, value: Any, seconds: float) -> list[Any]:
        with self._telling():
            mine, texts = json.dumps(value).encode(), dict[int, bytearray]()

            def receive(channel: Channel) -> Flow:
                texts[channel.peer] = yield from channel.receive(GATHER)

            if self.rank:
                going: Flows = self._with_all(lambda server: server.send(GATHER, mine))
                self._run(self._with_all(receive) + going, silence=_longer(seconds))
                return list(parse_json_of_peer(0, texts[0]))
            self._run(self._with_all(receive), time.monotonic() + seconds)
            values = [value, *(parse_json_of_peer(rank, texts[rank]) for rank in self._channels)]
            answer = json.dumps(values).encode()
            self._run(self._with_all(lambda channel: channel.send(GATHER, answer)))
            return values

    def _begin(self, code: bytes, size: int) -> None:
        """Wait, as the server, until all others have begun this operation."""
        self._run(self._with_all(lambda channel: channel.expect(code, size)), time.monotonic() + self.timeout)

    def _ask(self, send: Callable[[Channel], Flow], code: bytes, parts: Sequence[Tensor]) -> None:
        """Send, as a worker, and receive the parts of the result meanwhile."""

        def receive(server: Channel) -> Flow:
            for part in parts:
                yield from receive_into(server, code, view_bytes(part))

        self._run(self._with_all(receive) + self._with_all(send), silence=_longer(self.timeout))

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """End the group with a failure, which the server tells all others."""
        try:
            yield
        except BaseException as error:
            lost = error if isinstance(error, PeerError) else None
            self._end(lost or PeerError(self.rank, f"rank {self.rank} failed: {type(error).__name__}: {error}"))
            raise

    def _end(self, error: PeerError) -> None:
        if self.rank == 0 and error.rank is not None:  # else it was called off
            with contextlib.suppress(PeerError):  # a lost peer does not listen
                told = self._with_all(lambda channel: channel.refuse(error.rank, str(error)))
                run_flows(told, TELL_SECONDS, time.monotonic() + TELL_SECONDS)
        self.close()


def _longer(seconds: float) -> float:
    """A worker waits longer than the server waits for others: only the server knows which of them is late."""
    return seconds + min(5.0, seconds / 4)


def _parts(flat: Tensor) -> Sequence[Tensor]:
    return flat.split(PART_BYTES // flat.element_size()) if len(flat) else ()
