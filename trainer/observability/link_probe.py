"""The probe of the links between ranks, one by one. When it is due is `trainer.observability.comm_profiler`."""

from __future__ import annotations

import time

import torch

from trainer.comm.group import GroupError
from trainer.comm.socket_group import MeshGroup
from trainer.comm.torch_transport import TorchTransport, Transport

LEAST_BYTES, MOST_BYTES, GROWTH, MOST_SECONDS = 1 << 12, 1 << 20, 4, 2.0
"""A probe sends the least first, and more as long as that is expected to take no longer than this."""


def links(size: int) -> list[tuple[int, int]]:
    """Return the (from, to) of the links to probe: around the ring, and between every other rank."""
    return [(rank, (rank + offset) % size) for offset in (1, 2)[: size - 1] for rank in range(size)]


def time_links(transport: Transport, rank: int, size: int) -> tuple[int, dict[tuple[int, int], float], float]:
    """Return the bytes of a probe; the seconds that these and a short answer take over each of the `links`, which are
    probed one after the other; and the seconds of the whole. The same on all ranks.

    The speed of a link is not known before, and all-reduces say nothing of links outside their ring. So probing begins
    with few bytes and goes on with more only if, by the times so far, that is expected to fit in `MOST_SECONDS`. Raise
    `GroupError` on a transport that sends nothing between two ranks.
    """
    if not isinstance(transport, TorchTransport | MeshGroup):
        raise GroupError("links can be probed only if every rank has a connection to every other one")
    bytes_, took, before = LEAST_BYTES, 0.0, 0.0
    while True:
        *seconds, last = _send_over_links(transport, rank, size, bytes_)
        took += last
        # What bytes take grows with them; latency does not.
        expected = last + GROWTH * max(0.0, sum(seconds) - before)
        if bytes_ >= MOST_BYTES or took + expected > MOST_SECONDS:
            return bytes_, dict(zip(links(size), seconds, strict=True)), took
        bytes_, before = GROWTH * bytes_, sum(seconds)


def _send_over_links(transport: TorchTransport | MeshGroup, rank: int, size: int, bytes_: int) -> list[float]:
    """Seconds of each link, then of all of it, by rank 0's clock."""
    seconds = torch.zeros(len(links(size)) + 1, dtype=torch.float64)
    data, word = torch.zeros(bytes_, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    all_began = time.monotonic()
    for number, (source, target) in enumerate(links(size)):
        transport.all_reduce(torch.zeros(1))  # nobody else is talking
        if rank == source:
            for message in (word, data):  # the word first, so that both are there when the clock starts
                began = time.monotonic()
                transport.send(message, target)
                transport.receive(word, target)
                seconds[number] = time.monotonic() - began
        elif rank == target:
            for message in (word, data):
                transport.receive(message, source)
                transport.send(word, source)
    transport.all_reduce(torch.zeros(1))  # the last of them is done
    if rank == 0:
        seconds[-1] = time.monotonic() - all_began
    transport.all_reduce(seconds)
    return seconds.tolist()
