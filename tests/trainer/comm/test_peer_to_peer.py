"""Small sums over connections of our own, by the thread that wants them: real sockets, ranks in one process."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from trainer.comm.framed_socket import PeerError
from trainer.comm.group import InterruptibleGroup
from trainer.comm.peer_to_peer import FAR_BYTES, NEAR_BYTES, PeerToPeerAllReduce, connect_all
from trainer.comm.torch_transport import TorchTransport, make_torch_transport

NEVER = 1000.0


def on_all(size: int, work: Callable[[int], Any]) -> list[Future[Any]]:
    with ThreadPoolExecutor(size) as pool:
        return [pool.submit(work, rank) for rank in range(size)]


def connected(size: int, timeout: float = NEVER, store: Any = None) -> list[PeerToPeerAllReduce]:
    store = dist.HashStore() if store is None else store
    return [future.result() for future in on_all(size, lambda rank: connect_all(store, rank, size, HOST, timeout))]


HOST = "127.0.0.1"


@pytest.fixture
def pair() -> Iterator[list[PeerToPeerAllReduce]]:
    links = connected(2, timeout=0.5)
    yield links
    for link in links:
        link.close()


def test_what_is_small_depends_on_how_often_it_is_sent_and_how_far() -> None:
    def takes(size: int, one_host: bool, bytes_: int) -> bool:
        ends = [socket.socketpair() for _ in range(size - 1)]
        links = PeerToPeerAllReduce(0, {rank: ends[rank - 1][0] for rank in range(1, size)}, NEVER, one_host)
        try:
            return links.takes(torch.empty(bytes_, dtype=torch.uint8))
        finally:
            links.close()
            for _, other in ends:
                other.close()

    assert takes(2, False, NEAR_BYTES)
    assert not takes(2, False, NEAR_BYTES + 1)
    assert takes(3, True, NEAR_BYTES // 2)
    assert not takes(3, True, NEAR_BYTES // 2 + 1)
    assert takes(3, False, FAR_BYTES // 2)
    assert not takes(3, False, FAR_BYTES // 2 + 1)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (100_000,)])
def test_all_add_up_the_same_in_any_order_of_arrival(size: int, shape: tuple[int, ...]) -> None:
    links = connected(size)
    torch.manual_seed(0)
    values = torch.randn(size, 20, *shape)

    def work(rank: int) -> list[torch.Tensor]:
        found = []
        for number in range(20):
            if number % size == rank:
                time.sleep(0.002)  # each is late in turn, and others are ahead of it
            found.append(values[rank, number].clone())
            links[rank].all_reduce(found[-1])
        return found

    [first, *others] = [future.result() for future in on_all(size, work)]
    for number, total in enumerate(first):
        torch.testing.assert_close(total, values[:, number].sum(0))
        for other in others:
            assert torch.equal(total, other[number]), "the same bits"
    for link in links:
        link.close()


def test_who_is_late_and_who_is_gone_are_named(pair: list[PeerToPeerAllReduce]) -> None:
    with pytest.raises(PeerError, match=r"no data arrived from ranks \[1\] for 0.5 s"):
        pair[0].all_reduce(torch.ones(4))
    pair[1].close()
    with pytest.raises(PeerError, match=r"rank 1"):
        pair[0].all_reduce(torch.ones(4))


def test_ranks_that_sum_something_else_are_told_apart_from_slow_ones(pair: list[PeerToPeerAllReduce]) -> None:
    errors = [future.exception() for future in on_all(2, lambda rank: pair[rank].all_reduce(torch.ones(4 + rank)))]
    assert "rank 1 is at sum 1, of 20 bytes; this is 1, of 16" in str(errors[0])


def test_who_waits_is_woken_when_it_is_called_off() -> None:
    links = connected(2)
    timer = threading.Timer(0.2, links[0].interrupt)
    timer.start()
    with pytest.raises(PeerError, match="called off"):
        links[0].all_reduce(torch.ones(4))
    for link in links:
        link.close()


def test_what_is_there_already_counts_though_it_is_called_off() -> None:
    """And to call it off over and over, with nobody looking, holds nobody up."""
    links = connected(2)
    for _ in range(2000):
        links[0].interrupt()
    tensors = [torch.ones(4), torch.ones(4)]
    other = ThreadPoolExecutor(1).submit(links[1].all_reduce, tensors[1])
    time.sleep(0.2)
    links[0].all_reduce(tensors[0])
    other.result(60)
    assert tensors[0].tolist() == [2.0] * 4
    with pytest.raises(PeerError, match="called off"):
        links[0].all_reduce(torch.ones(4))
    for link in links:
        link.close()


def test_strangers_at_the_door_keep_nobody_out() -> None:
    """One says nothing, one says something else; both come first."""

    class Door(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            if key == "0":
                port = json.loads(value)[1]
                strangers.extend(socket.create_connection((HOST, port)) for _ in range(2))
                strangers[1].sendall(b"x" * 100)
            super().set(key, value)

    strangers: list[socket.socket] = []
    links = connected(2, store=Door())
    tensors = [torch.ones(3), torch.ones(3)]
    for future in on_all(2, lambda rank: links[rank].all_reduce(tensors[rank])):
        future.result()
    assert tensors[0].tolist() == [2.0] * 3
    for end in (*links, *strangers):
        end.close()


def groups(size: int) -> list[InterruptibleGroup]:
    store = dist.HashStore()

    def opener(rank: int) -> Callable[[], TorchTransport]:
        return lambda: make_torch_transport(store, rank, size, None, 60.0, 60.0, HOST)

    return [InterruptibleGroup(rank, size, opener(rank)) for rank in range(size)]


def summed(group: InterruptibleGroup, value: float) -> tuple[float, list[str]]:
    group.run("barrier", lambda transport: transport.barrier(60.0))
    with mock.patch.object(group, "submit", wraps=group.submit) as submit:
        total = group.all_reduce("all-reduce", torch.full((4,), value)).result()
    return total[0].item(), [call.args[0] for call in submit.call_args_list]


def test_a_small_sum_needs_no_other_thread_and_is_noted_like_any() -> None:
    pair = groups(2)
    found = [future.result() for future in on_all(2, lambda rank: summed(pair[rank], rank + 1.0))]
    assert found == [(3.0, [])] * 2
    latest = pair[0].collectives[-1]
    assert (latest.what, latest.bytes, latest.sequence) == ("all-reduce", 16, 2)
    assert latest.began is not None
    assert latest.ended is not None
    assert latest.submitted <= latest.began <= latest.ended
    assert pair[0].doing[0] == "nothing"
    on_all(2, lambda rank: pair[rank].close())


def test_where_one_rank_has_no_links_all_take_the_other_way(caplog: pytest.LogCaptureFixture) -> None:
    real, turns = socket.create_server, iter((True, False))

    def once_without_a_port(*given: Any, **named: Any) -> socket.socket:
        if next(turns):
            raise OSError("there is no port left")
        return real(*given, **named)

    with mock.patch("socket.create_server", once_without_a_port):
        pair = groups(2)
        found = [future.result() for future in on_all(2, lambda rank: summed(pair[rank], rank + 1.0))]
    assert found == [(3.0, ["all-reduce"])] * 2
    assert "there is no port left" in caplog.text
    assert "does not listen at any address" in caplog.text
    on_all(2, lambda rank: pair[rank].close())
