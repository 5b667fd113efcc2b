"""Ranks of an encrypted mesh as threads of one process, for tests."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from trainer.comm.launch_certificate import LaunchCertificate
from trainer.comm.launch_secret import LaunchSecret
from trainer.comm.socket_group import MeshGroup, connect_mesh

SECRET, KEY, HOST = LaunchSecret(b"s" * 32), b"key", "127.0.0.1"
T = TypeVar("T")


def listeners(size: int) -> list[socket.socket]:
    return [socket.create_server((HOST, 0)) for _ in range(size)]


def places_of(sockets: Sequence[socket.socket]) -> list[tuple[str, int]]:
    return [one.getsockname() for one in sockets]


def join(
    places: Sequence[tuple[str, int]], rank: int, listener: socket.socket, timeout: float = 60.0,
    contexts: Any = None, key: bytes = KEY,
) -> MeshGroup:  # fmt: skip
    contexts = contexts or LaunchCertificate(SECRET, "job")
    return MeshGroup(rank, connect_mesh(places, rank, listener, key, timeout, contexts), timeout)


def on_all(ranks: Sequence[T], action: Callable[[int, T], Any]) -> list[Any]:
    """The results of an action on all ranks at once, in order of rank."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        going = [pool.submit(action, rank, one) for rank, one in enumerate(ranks)]
        return [one.result(120) for one in going]


@contextmanager
def mesh_of(size: int, timeout: float = 60.0) -> Iterator[list[MeshGroup]]:
    sockets = listeners(size)
    places = places_of(sockets)
    made = on_all(sockets, lambda rank, listener: join(places, rank, listener, timeout))
    try:
        yield made
    finally:
        for one in made:
            one.close()
