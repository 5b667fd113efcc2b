"""Parameter-server mode (D3): the collectives of a generation over a hub, rank 0, on sockets of our own.

It needs nothing but a connection from each rank to rank 0, so it works where links between other ranks are cut, where
gloo or NCCL fail, and, with TLS, where what goes over the network must be encrypted. It is slower than all-reduce: all
gradients go through one host.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from typing import Any

import torch

CHUNK_BYTES = 1 << 20
_HEADER = struct.Struct("!cQ")


class StarError(RuntimeError):
    """A peer is lost, late or strange. The message names it, the operation, and how long it was waited for."""


class Star:
    """One rank's end. Every rank must call the same operations in the same order."""

    def __init__(self, rank: int, world_size: int, sockets: dict[int, socket.socket], timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._sockets = dict(sorted(sockets.items()))
        """By rank: all others at the hub, the hub alone elsewhere."""
        for connection in self._sockets.values():
            connection.settimeout(timeout)
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def hub(
        cls, listener: socket.socket, world_size: int, token: str, timeout: float, tls: ssl.SSLContext | None = None
    ) -> Star:
        """Rank 0: wait for the others at ``listener``, which is closed then. `StarError` if they do not come in time.

        Who does not know the token, or has no certificate of the job's authority, is turned away."""
        sockets: dict[int, socket.socket] = {}
        refused = ""
        deadline = time.monotonic() + timeout
        with listener:
            while len(sockets) < world_size - 1:
                listener.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    connection, address = listener.accept()
                except TimeoutError as error:
                    late = sorted(set(range(1, world_size)) - set(sockets))
                    raise StarError(f"ranks {late} did not come to the hub within {timeout:g} s{refused}") from error
                try:
                    connection.settimeout(min(timeout, 5.0))
                    connection = tls.wrap_socket(connection, server_side=True) if tls else connection
                    hello = json.loads(_receive(connection, _read_length(connection, 4096)))
                    if hello["token"] != token or not 0 < hello["rank"] < world_size or hello["rank"] in sockets:
                        raise StarError(f"says {hello}")
                    connection.sendall(b"+")
                    sockets[hello["rank"]] = connection
                except (OSError, ValueError, KeyError, TypeError, StarError) as error:
                    refused = f"; {address[0]} was refused: {error}"
                    connection.close()
        return cls(0, world_size, sockets, timeout)

    @classmethod
    def spoke(
        cls, address: tuple[str, int], rank: int, world_size: int, token: str, timeout: float,
        tls: ssl.SSLContext | None = None,
    ) -> Star:  # fmt: skip
        """Another rank: connect to the hub, for as long as ``timeout`` if it is not there yet."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                connection = socket.create_connection(address, timeout=max(0.001, deadline - time.monotonic()))
                break
            except OSError as error:
                if time.monotonic() + 0.05 > deadline:
                    raise StarError(f"no hub at {address[0]}:{address[1]} within {timeout:g} s: {error}") from error
                time.sleep(0.05)
        try:
            connection.settimeout(timeout)
            connection = tls.wrap_socket(connection) if tls else connection
            hello = json.dumps({"token": token, "rank": rank}).encode()
            connection.sendall(struct.pack("!Q", len(hello)) + hello)
            if connection.recv(1) != b"+":
                raise StarError("it closed the connection: another generation's hub, or a certificate it does not take")
        except (OSError, StarError) as error:
            connection.close()
            raise StarError(f"the hub at {address[0]}:{address[1]} refused rank {rank}: {error}") from error
        return cls(rank, world_size, {0: connection}, timeout)

    def sum(self, tensor: torch.Tensor) -> None:
        """Add up over ranks, in place: in order of rank, so that all have the same bits whoever comes first."""
        host = tensor.detach().to("cpu").contiguous()
        flat = host.view(-1)
        data = _bytes_of(flat)
        if self.rank == 0:
            self._agree(b"S", len(data))
            step = max(1, CHUNK_BYTES // max(1, flat.element_size()))
            other = torch.empty(min(step, flat.numel()), dtype=flat.dtype)
            for first in range(0, flat.numel(), step):
                part = flat[first : first + step]
                theirs = other[: part.numel()]
                buffer = _bytes_of(theirs)
                for rank, connection in self._sockets.items():
                    with self._naming(rank, "sum"):
                        _receive_into(connection, buffer)
                    part += theirs
                result = _bytes_of(part)
                for rank, connection in self._sockets.items():
                    with self._naming(rank, "sum"):
                        connection.sendall(result)
        else:
            hub = self._sockets[0]
            with self._naming(0, "sum"):
                hub.sendall(_HEADER.pack(b"S", len(data)))
                # One part out, one part in: never do both sides write, so full buffers block nobody.
                step = max(1, CHUNK_BYTES // max(1, flat.element_size())) * flat.element_size()
                for first in range(0, len(data), step):
                    hub.sendall(data[first : first + step])
                    _receive_into(hub, data[first : first + step])
        tensor.copy_(host.view_as(tensor))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's values for everybody, in place."""
        host = tensor.detach().to("cpu").contiguous()
        data = _bytes_of(host.view(-1))
        if self.rank == 0:
            self._agree(b"B", len(data))
            for rank, connection in self._sockets.items():
                with self._naming(rank, "broadcast"):
                    connection.sendall(data)
            return
        with self._naming(0, "broadcast"):
            self._sockets[0].sendall(_HEADER.pack(b"B", len(data)))
            _receive_into(self._sockets[0], data)
        tensor.copy_(host.view_as(tensor))

    def gather(self, value: Any, timeout: float | None = None) -> list[Any]:
        """One small value (JSON) from every rank, for every rank, in order of rank."""
        text = json.dumps(value).encode()
        if self.rank == 0:
            values = [value]
            for rank, connection in self._sockets.items():
                with self._naming(rank, "gather", timeout):
                    code, size = _HEADER.unpack(_receive(connection, _HEADER.size))
                    if code != b"G":
                        raise StarError(f"it does {code!r}")
                    values.append(json.loads(_receive(connection, size)))
            answer = json.dumps(values).encode()
            for rank, connection in self._sockets.items():
                with self._naming(rank, "gather"):
                    connection.sendall(struct.pack("!Q", len(answer)) + answer)
            return json.loads(answer)
        with self._naming(0, "gather", timeout):
            hub = self._sockets[0]
            hub.sendall(_HEADER.pack(b"G", len(text)) + text)
            return json.loads(_receive(hub, _read_length(hub)))

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every rank is here, for as long as ``timeout`` seconds (None: as for anything else)."""
        self.gather(None, timeout)

    def abort(self) -> None:
        """From any thread: whoever waits in here fails at once."""
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)  # an SSLSocket's own would wait for the peer

    def close(self) -> None:
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.close()

    def _agree(self, code: bytes, size: int) -> None:
        """At the hub: is everybody at the same operation, with as many bytes?"""
        for rank, connection in self._sockets.items():
            with self._naming(rank, "agreement"):
                theirs = _HEADER.unpack(_receive(connection, _HEADER.size))
                if theirs != (code, size):
                    raise StarError(f"it does {theirs}, the hub does {(code, size)}")

    @contextlib.contextmanager
    def _naming(self, rank: int, what: str, timeout: float | None = None) -> Iterator[None]:
        began, connection = time.monotonic(), self._sockets[rank]
        if timeout is not None:
            connection.settimeout(timeout)
        try:
            yield
        except (OSError, ValueError, StarError, struct.error) as error:
            waited = time.monotonic() - began
            raise StarError(f"rank {rank} failed in {what} after {waited:.1f} s: {error or 'no answer'}") from error
        finally:
            if timeout is not None:
                with contextlib.suppress(OSError):
                    connection.settimeout(self.timeout)


def _bytes_of(flat: torch.Tensor) -> memoryview:
    """The memory of a one-dimensional tensor on the CPU, without a copy."""
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _receive_into(connection: socket.socket, buffer: memoryview) -> None:
    at = 0
    while at < len(buffer):
        count = connection.recv_into(buffer[at:])
        if not count:
            raise ConnectionResetError("it closed the connection")
        at += count


def _receive(connection: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    _receive_into(connection, memoryview(buffer))
    return bytes(buffer)


def _read_length(connection: socket.socket, limit: int = 1 << 32) -> int:
    [size] = struct.unpack("!Q", _receive(connection, 8))
    if size > limit:
        raise StarError(f"it announces {size} bytes")
    return int(size)
