"""Parameter-server mode: the collectives of a generation over a server, rank 0, on framed sockets.

It needs only a connection from each rank to rank 0, so it works where links between other ranks are cut, where
gloo or NCCL fail, and, with TLS, where the traffic must be encrypted. It is slower than all-reduce: all
gradients go through one host.

A worker announces its operation (`_HEAD`) and sends its data while sums come back. The server receives from all
workers while it sends to all of them, and sends the reason if there is no result.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch

from trainer.comm.framed_socket import (
    SIZE,
    Flow,
    FramedSocket,
    PeerError,
    check_announced_size,
    open_connection,
    parse_json_of_peer,
    prepare_socket,
    run_flows,
    view_bytes,
)
from trainer.comm.handshake import authenticate_caller, authenticate_to_listener
from trainer.comm.listener import SPEAK_SECONDS, Door

PART_BYTES = 1 << 20
"""The bytes that the server adds up, and passes on, at a time."""
RETRY_SECONDS = 0.05
DROPPED_OFTEN = 20
"""A worker whose connection was closed without an answer this often is not wanted; fewer times, the server was busy
with others."""
TLS_SECONDS = 4.0
"""Additional seconds for a new connection at the server if TLS comes first."""
TELL_SECONDS = 1.0
"""The seconds for which the server tries to tell the workers why it fails."""

_HEAD = struct.Struct("!c16sQ")
SERVER = "server"
_OPERATIONS = {b"S": "sum", b"B": "broadcast", b"G": "gather"}


class ParameterServerError(RuntimeError):
    """A peer is lost, late or invalid. The message names it, the operation and its duration in seconds.

    ``rank`` is None if no rank failed and the group was called off."""

    def __init__(self, message: str, rank: int | None, operation: str, seconds: float) -> None:
        super().__init__(message)
        self.rank, self.operation, self.seconds = rank, operation, seconds


class ParameterServerGroup:
    """One rank's end of the group. All ranks must call the same operations in the same order, on one thread at a time.

    ``timeout``: seconds within which all ranks have to start an operation, and after which silence during one is a
    failure; a slow connection is not. After a `ParameterServerError` the group cannot be used again on any rank, and
    the content of the operation's tensor is undefined.
    """

    def __init__(self, rank: int, world_size: int, sockets: dict[int, socket.socket], timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._links = {peer: FramedSocket(peer, sockets[peer]) for peer in sorted(sockets)}
        """The links by rank: to all others at the server, to the server alone elsewhere."""
        self._error: ParameterServerError | None = None
        self._aborted = False

    @classmethod
    def serve(
        cls, listener: socket.socket, world_size: int, key: bytes, timeout: float, tls: ssl.SSLContext | None = None
    ) -> ParameterServerGroup:
        """Return rank 0's end once all others have connected to ``listener``, which is then closed. Raise
        `ParameterServerError` if they do not come in time.

        A peer without the key, or without a certificate of the job's authority, is turned away; a silent peer does
        not keep others out."""
        began, refused = time.monotonic(), list[str]()
        sockets: dict[int, socket.socket] = {}
        try:
            with listener:
                _admit(listener, world_size, key, tls, began + timeout, sockets, refused)
        except OSError as error:
            late = [rank for rank in range(1, world_size) if rank not in sockets]
            why = f"within {timeout:g} s" if isinstance(error, TimeoutError) else f"before it failed: {error}"
            message = "; ".join([f"ranks {late} did not connect to the server {why}", *refused[-3:]])
            lost = ParameterServerError(message, late[0], "forming", time.monotonic() - began)
            cls(0, world_size, sockets, timeout)._end(lost)
            raise lost from error
        return cls(0, world_size, sockets, timeout)

    @classmethod
    def connect_worker(
        cls, address: tuple[str, int], rank: int, world_size: int, key: bytes, timeout: float,
        tls: ssl.SSLContext | None = None,
    ) -> ParameterServerGroup:  # fmt: skip
        """Return a worker's end, connected to the server; retry for ``timeout`` if it is absent or overloaded."""
        began, place, dropped = time.monotonic(), f"{address[0]}:{address[1]}", 0
        until = began + timeout
        while True:
            link = None
            try:
                link = FramedSocket(
                    0, prepare_socket(open_connection(address, until - time.monotonic()), tls, server_side=False)
                )
                run_flows([(link, _introduce(link, key, rank, world_size))], timeout, until)
                return cls(rank, world_size, {0: link.connection}, timeout)
            except (OSError, PeerError) as error:
                seconds = time.monotonic() - began
                if link is not None:
                    link.connection.close()
                was_dropped = isinstance(error.__cause__, ConnectionResetError | BrokenPipeError)
                dropped += was_dropped
                again = link is None or (was_dropped and dropped < DROPPED_OFTEN)
                if again and seconds + RETRY_SECONDS <= timeout:
                    time.sleep(RETRY_SECONDS)
                    continue
                message = f"rank 0, the server, cannot be reached at {place} within {timeout:g} s: {error}"
                if link is not None:
                    told = isinstance(error, PeerError) and error.told
                    hint = "" if told or "training.tls" in str(error) else "; is training.tls the same on all nodes?"
                    message = f"rank 0, the server at {place}, rejected rank {rank}: {error}{hint}"
                raise ParameterServerError(message, 0, "forming", seconds) from error

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place: in order of rank, so that the bits do not depend on the order of arrival.

        Integers wrap. Any type and device; a GPU's tensor goes by way of the host's memory."""
        target = tensor.detach()
        host = target.cpu().contiguous()
        with self._doing("sum"):
            parts = _parts(host)
            if self.rank == 0:
                self._heads(_head(b"S", host), self.timeout)
                self._sum(parts)
            else:
                views = [view_bytes(part) for part in parts]
                # The sum overwrites its part, which has left by then: the server needs all of it to add it up.
                self._exchange([_head(b"S", host), *views], views)
        if host is not target:
            target.copy_(host)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's values to all ranks, in place."""
        target = tensor.detach()
        host = target.cpu().contiguous()
        with self._doing("broadcast"):
            views = [view_bytes(part) for part in _parts(host)]
            if self.rank == 0:
                self._heads(_head(b"B", host), self.timeout)
                self._with_all(lambda link: link.send(*(piece for view in views for piece in (b"=", view))))
            else:
                self._exchange([_head(b"B", host)], views)
        if self.rank and host is not target:
            target.copy_(host)

    def all_gather_object(self, value: Any, timeout: float | None = None) -> list[Any]:
        """Return one small value (JSON, at most 64 MiB for all) from every rank, on every rank, in order of rank."""
        seconds = self.timeout if timeout is None else timeout
        with self._doing("gather"):
            text = json.dumps(value).encode()
            head = _HEAD.pack(b"G", b"json", len(text))
            if self.rank == 0:
                texts = {
                    rank: bytearray(check_announced_size(rank, size))
                    for rank, size in self._heads(head, seconds).items()
                }
                self._with_all(lambda link: link.receive(texts[link.rank]))
                values = [json.loads(text), *(parse_json_of_peer(rank, raw) for rank, raw in texts.items())]
                authenticate_caller = json.dumps(values).encode()
                self._with_all(
                    lambda link: link.send(b"=", SIZE.pack(len(authenticate_caller)), b"=", authenticate_caller)
                )
                return values
            size = bytearray(SIZE.size)
            self._exchange([head, text], [memoryview(size)], seconds)
            raw = bytearray(check_announced_size(0, SIZE.unpack(size)[0]))
            self._exchange([], [memoryview(raw)])
            return parse_json_of_peer(0, raw)

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every rank is here, for ``timeout`` seconds at most (None: the group's timeout)."""
        self.all_gather_object(None, timeout)

    def abort(self) -> None:
        """Make all present and later calls on this end fail at once. Any thread may call it."""
        self._aborted = True
        for link in self._links.values():
            with contextlib.suppress(OSError):
                socket.socket.shutdown(link.connection, socket.SHUT_RDWR)  # an SSLSocket's own may wait for the peer

    def close(self) -> None:
        """Close the connections. While another thread uses the group, call `abort` instead."""
        for link in self._links.values():
            link.connection.close()

    # The server's side.

    def _sum(self, parts: Sequence[torch.Tensor]) -> None:
        """Send the sum of one part to all workers while the next part is received from them."""
        theirs = {rank: torch.empty_like(parts[0]) for rank in self._links} if parts else {}
        going: list[tuple[FramedSocket, Flow]] = []
        for part in parts:
            buffers = {rank: view_bytes(other[: part.numel()]) for rank, other in theirs.items()}
            coming = [(link, link.receive(buffers[link.rank])) for link in self._links.values()]
            run_flows([*going, *coming], self.timeout)
            for other in theirs.values():
                part += other[: part.numel()]
            result = view_bytes(part)
            going = [(link, link.send(b"=", result)) for link in self._links.values()]
        run_flows(going, self.timeout)

    def _heads(self, mine: bytes, seconds: float) -> dict[int, int]:
        """Return the bytes that each rank is about to send, once all have announced the same operation as this one, for
        which they have ``seconds``. Only a gather's sizes may differ."""
        raw = {rank: bytearray(_HEAD.size) for rank in self._links}
        self._with_all(lambda link: _receive_head(link, raw[link.rank], mine), time.monotonic() + seconds)
        return {rank: _HEAD.unpack(head)[2] for rank, head in raw.items()}

    def _with_all(self, make: Callable[[FramedSocket], Flow], until: float | None = None) -> None:
        """Run a flow with each worker, all at once."""
        run_flows([(link, make(link)) for link in self._links.values()], self.timeout, until)

    # A worker's side.

    def _exchange(self, data: Sequence[Any], parts: Sequence[memoryview], seconds: float | None = None) -> None:
        """Send data to the server and receive parts of a result, both at once."""
        link, seconds = self._links[0], self.timeout if seconds is None else seconds
        # Longer than the server waits for the others: only the server knows which of them is late.
        run_flows([(link, link.receive_parts(parts)), (link, link.send(*data))], seconds + min(5.0, seconds / 4))

    # Both.

    @contextlib.contextmanager
    def _doing(self, operation: str) -> Iterator[None]:
        """Name the operation in a peer's failure. Any failure ends the group."""
        if self._error is not None:
            raise ParameterServerError(
                f"{operation} after the group broke: {self._error}", self._error.rank, operation, 0.0
            )
        began = time.monotonic()
        try:
            yield
        except PeerError as error:
            lost = self._lost(error, operation, time.monotonic() - began)
            self._end(lost)
            raise lost from error
        except BaseException as error:
            message = f"rank {self.rank} failed in {operation}: {type(error).__name__}: {error}"
            self._end(ParameterServerError(message, self.rank, operation, time.monotonic() - began))
            raise

    def _lost(self, error: PeerError, operation: str, seconds: float) -> ParameterServerError:
        if self._aborted:
            return ParameterServerError(f"{operation} was called off after {seconds:.1f} s", None, operation, seconds)
        if error.told:
            message = f"{operation} failed after {seconds:.1f} s, since the server says: {error}"
        else:
            message = f"rank {error.rank} failed in {operation} after {seconds:.1f} s: {error}"
        return ParameterServerError(message, error.rank, operation, seconds)

    def _end(self, error: ParameterServerError) -> None:
        """Close all links. The server sends the reason, so no worker waits for it or blames it."""
        self._error = error
        if self.rank == 0 and not self._aborted:
            with contextlib.suppress(PeerError):  # a lost peer does not listen
                reasons = [(link, link.refuse(error.rank, str(error))) for link in self._links.values()]
                run_flows(reasons, TELL_SECONDS, time.monotonic() + TELL_SECONDS)
        self.close()


def _admit(
    listener: socket.socket, world_size: int, key: bytes, tls: ssl.SSLContext | None, until: float,
    sockets: dict[int, socket.socket], refused: list[str],
) -> None:  # fmt: skip
    """Admit one worker for each rank, authenticate several at once, and record those that were refused.

    Raise OSError if the listener fails, TimeoutError (a subclass) at the deadline."""

    def welcome(guest: FramedSocket) -> Generator[int, None, int]:
        return _welcome(guest, tls, world_size, key, sockets)

    door: Door[int] = Door(listener, welcome, SPEAK_SECONDS + (TLS_SECONDS if tls else 0.0), refused)
    try:
        while len(sockets) < world_size - 1:
            guest, rank = door.next(until)
            sockets[rank] = guest.connection
    finally:
        door.close()


def _welcome(
    guest: FramedSocket, tls: ssl.SSLContext | None, world_size: int, key: bytes, sockets: dict[int, socket.socket]
) -> Generator[int, None, int]:
    """Authenticate a worker at the server; return its rank once the worker knows that it is admitted."""
    guest.connection = prepare_socket(guest.connection, tls, server_side=True)
    yield from guest.shake_hands()
    name = yield from authenticate_caller(guest, key, SERVER)
    size = bytearray(SIZE.size)
    yield from guest.receive(size)
    rank, why = int(name) if name.isdecimal() else -1, ""
    if SIZE.unpack(size)[0] != world_size or not 0 < rank < world_size:
        why = f"it claims to be rank {name} of {SIZE.unpack(size)[0]} in a world of {world_size}"
    elif rank in sockets:
        why = f"rank {rank} is already connected"
    if why:
        raise PeerError(None, why)
    yield from guest.send(b"=")
    if rank in sockets:  # while the last word was on its way
        raise PeerError(None, f"rank {rank} is already connected")
    return rank


def _introduce(link: FramedSocket, key: bytes, rank: int, world_size: int) -> Flow:
    """Authenticate this worker to the server."""
    yield from link.shake_hands()
    yield from authenticate_to_listener(link, key, str(rank), SERVER)
    yield from link.send(SIZE.pack(world_size))
    yield from link.receive_parts([memoryview(b"")])


def _receive_head(link: FramedSocket, raw: bytearray, mine: bytes) -> Flow:
    yield from link.receive(raw)
    theirs, own = _HEAD.unpack(raw), _HEAD.unpack(mine)
    if theirs[:2] != own[:2] or (theirs[2] != own[2] and own[0] != b"G"):
        raise PeerError(link.rank, f"its {_in_words(theirs)} does not fit the server's {_in_words(own)}")


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    flat = tensor.view(-1)
    return flat.split(PART_BYTES // flat.element_size()) if flat.numel() else ()


def _head(code: bytes, tensor: torch.Tensor) -> bytes:
    return _HEAD.pack(code, str(tensor.dtype).removeprefix("torch.").encode(), tensor.numel() * tensor.element_size())


def _in_words(head: tuple[bytes, bytes, int]) -> str:
    code, kind, size = head
    return f"{_OPERATIONS.get(code, repr(code))} of {size:,} bytes of {kind.rstrip(bytes(1)).decode(errors='replace')}"
