"""Collectives that a training can be woken from: real groups of gloo and real stars, peers that freeze and die."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from thread_worlds import NoTransport, at_once, gloo_openers, worlds_of

import trainer.comm.group
from harness.waiting import until
from harness.worlds import Forked
from trainer.comm.group import GroupError, InterruptibleGroup, has_abandoned_groups
from trainer.comm.launcher_env import RankFacts
from trainer.comm.parameter_server import ParameterServerGroup
from trainer.comm.socket_group import NEAR_BYTES, UNSHARED
from trainer.comm.static_rendezvous import open_listener
from trainer.comm.torch_transport import TorchTransport, make_torch_transport
from trainer.comm.world import World
from trainer.observability import link_probe
from trainer.observability.comm_profiler import FIELDS, MOST_STEPS, PROBE_EVERY, CommunicationProfiler
from trainer.observability.link_probe import LEAST_BYTES, MOST_BYTES, links, time_links
from trainer.runtime.step_timer import StepTimer

NEVER = 1000.0
"""A timeout that no test reaches."""

# Another rank as a process: makes the group, sums once, and then freezes or dies.
PEER = """
import os, signal, sys, torch
import torch.distributed as dist
from datetime import timedelta
from trainer.comm.group import InterruptibleGroup
from trainer.comm.torch_transport import make_torch_transport
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timedelta(seconds=60), wait_for_workers=False)
group = InterruptibleGroup(1, 2, lambda: make_torch_transport(store, 1, 2, None, 1000.0, 1000.0, "127.0.0.1"))
group.run("all-reduce", lambda transport: transport.all_reduce(torch.ones(1)))
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


class Ranks:
    """Groups of one world, all in this process."""

    def __init__(self, kind: str, size: int, timeout: float = NEVER) -> None:
        openers = gloo_openers(size, timeout)
        if kind == "star":
            listener = open_listener("127.0.0.1")
            address = ("127.0.0.1", listener.getsockname()[1])
            openers = [partial(ParameterServerGroup.serve, listener, size, b"key", timeout)]
            for rank in range(1, size):
                openers.append(partial(ParameterServerGroup.connect_worker, address, rank, size, b"key", timeout))
        self.worlds = worlds_of(openers)
        self.groups: list[Any] = [world.group for world in self.worlds]

    def all(self, work: Callable[[World], Any]) -> list[Any]:
        """What every rank comes to, when all do this at the same time."""
        return at_once(work, self.worlds)

    def close(self) -> None:
        at_once(InterruptibleGroup.close, self.groups)


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(kind: str = "torch", size: int = 2, timeout: float = NEVER) -> Ranks:
        made.append(Ranks(kind, size, timeout))
        return made[-1]

    yield make
    for world in made:
        for group in world.groups:
            group.fail("the test is over")
        world.close()
        for group in world.groups:
            if not group._thread.is_alive():
                group.transport = None  # closes its connections, which ends whoever waits for it
        for group in world.groups:
            group._thread.join(60)
            assert not group._thread.is_alive()
    made.clear()
    trainer.comm.group._ABANDONED.clear()


def blocked(work: Callable[[], Any]) -> ThreadPoolExecutor | Any:
    """Do it on a thread; what it raises or returns, as a future."""
    return ThreadPoolExecutor(1).submit(work)


def while_it_does(group: InterruptibleGroup, what: str) -> None:
    until(lambda: group.doing[0] == what, lambda: group.doing)


@pytest.mark.parametrize("kind", ["torch", "star"])
def test_all_ranks_get_the_same(ranks: Callable[..., Ranks], kind: str) -> None:
    world = ranks(kind, size=3)
    largest = 2**63 - 1

    def work(rank: World) -> list[Any]:
        rank.barrier()
        whole = rank.all_reduce(torch.tensor([largest, -rank.rank], dtype=torch.int64)).tolist()
        fractions = rank.all_reduce(torch.full((2, 3), 0.5, dtype=torch.float64)).tolist()
        told = rank.all_gather_object({"rank": rank.rank, "text": "ü" * 1000 * rank.rank})
        sent = []
        for source in range(3):
            tensor = torch.full((4,), rank.rank + 0.5)
            rank.broadcast(tensor, source)
            sent.append(tensor.tolist())
        raised = rank.any(rank.rank == 1, False)
        return [whole, fractions, told, sent, raised]

    [one, *others] = world.all(work)
    wrapped = (3 * largest + 2**63) % 2**64 - 2**63
    assert one[0] == [wrapped, -3], "whole numbers wrap around; the digests of samples count on it"
    assert one[1] == [[1.5] * 3] * 2
    assert one[2] == [{"rank": rank, "text": "ü" * 1000 * rank} for rank in range(3)]
    assert one[3] == [[0.5] * 4, [1.5] * 4, [2.5] * 4]
    assert one[4] == (True, False)
    assert others == [one, one]
    world.close()
    assert not any(group._thread.is_alive() for group in world.groups)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("numbers", [300, 2 * UNSHARED + 5, NEAR_BYTES // 4, NEAR_BYTES])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_a_sum_has_the_same_bits_on_all_ranks(
    ranks: Callable[..., Ranks], size: int, numbers: int, kind: torch.dtype
) -> None:
    """By peer-to-peer connections and by gloo's own all-reduce."""
    parts = torch.randn(size, numbers, generator=torch.Generator().manual_seed(size)).to(kind)
    found = ranks("torch", size=size).all(lambda rank: rank.all_reduce(parts[rank.rank].clone()))
    for other in found[1:]:
        assert torch.equal(found[0], other)
    torch.testing.assert_close(found[0].double(), parts.double().sum(0), rtol=0, atol=0.01)


@pytest.mark.parametrize(("kind", "numbers"), [("torch", NEAR_BYTES), ("torch", 5), ("star", 5)])
def test_who_waits_for_a_peer_is_woken_and_the_next_group_works(
    ranks: Callable[..., Ranks], kind: str, numbers: int
) -> None:
    world = ranks(kind, timeout=10.0)
    world.all(World.barrier)
    waiting = blocked(lambda: world.worlds[0].all_reduce(torch.ones(numbers)))
    while_it_does(world.groups[0], "all-reduce")
    world.groups[0].fail("n1 is silent", communication=False)
    error = waiting.exception(60)
    assert isinstance(error, GroupError)
    assert (str(error), error.communication) == ("n1 is silent", False)
    assert error.detail["operation"] == "all-reduce"
    assert 0 <= error.detail["waited_seconds"] < NEVER
    for again in (lambda: world.worlds[0].all_gather_object(1), lambda: world.worlds[0].barrier()):
        with pytest.raises(GroupError, match="n1 is silent"):
            again()  # at once
    world.groups[0].fail("something else")
    assert str(world.groups[0].error) == "n1 is silent", "the first reason counts"
    world.groups[0].close()
    is_by_gloo = kind == "torch" and numbers > 5
    assert world.groups[0]._thread.is_alive() == is_by_gloo, "which cannot be interrupted"
    assert has_abandoned_groups() == (kind == "torch"), "a peer may still wait in it"

    new = ranks(kind, size=3)
    assert new.all(lambda rank: rank.all_reduce(torch.ones(1)).item()) == [3.0] * 3


def test_nobody_waits_for_what_is_in_flight_in_a_group_that_failed(ranks: Callable[..., Ranks]) -> None:
    """Something is summed in the background; a peer that runs out of memory does not come to it."""
    world = ranks(timeout=10.0)
    world.all(World.barrier)
    group = world.groups[0]
    assert isinstance(group.transport, TorchTransport)
    work = group.transport.group.allreduce([torch.ones(3)])
    group.fail("n1 is out of memory")
    group.close()
    assert not group._thread.is_alive()
    assert has_abandoned_groups(), "the end of the process must not wait for it either"
    del group, world.groups[0], world.worlds[0]
    gc.collect()
    assert not work.is_completed(), "dropping the group has waited for it"


@pytest.mark.parametrize("kind", ["torch", "star"])
def test_a_peer_that_does_not_come_is_named_with_the_operation_and_the_seconds(
    ranks: Callable[..., Ranks], kind: str
) -> None:
    world = ranks(kind, timeout=1.0)
    world.all(World.barrier)
    with pytest.raises(GroupError, match=r"all-reduce failed after [\d.]+ s: ") as failed:
        world.worlds[0].all_reduce(torch.ones(5))
    assert failed.value.communication
    assert failed.value.detail["operation"] == "all-reduce"
    assert failed.value.detail["waited_seconds"] >= 0.9
    assert failed.value.detail["error"]


def test_a_group_that_does_not_come_about_says_so() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
        group = InterruptibleGroup(1, 2, lambda: ParameterServerGroup.connect_worker(address, 1, 2, b"key", 0.5))
        future = group.submit("all-reduce", lambda transport: transport.all_reduce(torch.ones(1)))
        error = future.exception(60)
    assert isinstance(error, GroupError)
    assert error.detail["operation"] == "forming the group"
    group.close()


@pytest.mark.parametrize(
    ("delay", "patience", "asked", "slowest"),
    [
        (lambda rank, target, size: 0.3 * ((rank, target, size) == (1, 0, MOST_BYTES)), NEVER, MOST_BYTES, {(1, 0)}),
        # 40 KB/s: a megabyte takes longer than a collective may, and what is known of the first bytes forbids it.
        (lambda rank, target, size: size / 40_000 * (rank == 2), 0.6, LEAST_BYTES, {(2, 0), (2, 1)}),
    ],
)
def test_links_that_are_slow_are_found_and_asked_no_more_than_they_can_carry_in_time(
    ranks: Callable[..., Ranks], delay: Callable[[int, int, int], float], patience: float, asked: int, slowest: set[Any]
) -> None:
    send, sent = TorchTransport.send, list[int]()

    def slow(transport: TorchTransport, tensor: torch.Tensor, target: int) -> None:
        sent.append(len(tensor))
        time.sleep(delay(transport.group.rank(), target, len(tensor)))
        send(transport, tensor, target)

    with mock.patch.object(TorchTransport, "send", slow), mock.patch.object(link_probe, "MOST_SECONDS", patience):
        look = lambda one: one.group.run("probe", partial(time_links, rank=one.rank, size=3))  # noqa: E731
        [(bytes_, seconds, took), *others] = ranks(size=3).all(look)
    assert others == [(bytes_, seconds, took)] * 2
    assert (bytes_, max(sent)) == (asked, asked)
    assert took > sum(seconds.values())
    assert all(value > 0 for value in seconds.values())
    assert set(sorted(seconds, key=seconds.__getitem__)[-len(slowest) :]) == slowest


def test_ranks_that_mostly_communicate_look_at_their_links_once(ranks: Callable[..., Ranks]) -> None:
    def work(world: World) -> list[Any]:
        timer = StepTimer(True, world.device)
        profiler = CommunicationProfiler(world, timer)
        probes = []
        for step in range(1, 7):
            timer.mark("input")
            timer.mark("backward")
            world.all_reduce(torch.ones(1000), "all-reduce of gradient bucket 0 (4,000 bytes)")
            timer.mark("exposed")
            profiler.add(8)
            world.all_reduce(torch.ones(3))  # between steps
            if step % 2 == 0:
                window = profiler.exchange(step, (0.5 * step, 16))
                assert window.collectives == (("bucket 0", 4000),)
                assert window.totals == (3 * 0.5 * step, 3 * 16)
                probes.append(profiler.probe(step))
        assert profiler.probe_at >= 6 + PROBE_EVERY
        after = CommunicationProfiler(world, timer, profiler.probe_at)
        after._shares.extend(profiler._shares)
        profiler.probe_at, profiler.world = 0, replace(world, backend="nccl")
        return [*probes, after.probe(6), profiler.probe(6)]

    [one, *others] = ranks(size=3).all(work)
    assert others == [one, one]
    assert [found is None for found in one] == [True, True, False, True, True]
    assert [tuple(row[:2]) for row in one[2]["seconds"]] == links(3)
    assert one[2]["step"] == 6
    assert one[2]["bytes"] >= 1 << 12


def test_of_a_long_window_the_last_steps_are_told() -> None:
    world = World(RankFacts(), torch.device("cpu"), "gloo")
    timer = StepTimer(True, world.device)
    profiler = CommunicationProfiler(world, timer)
    for step in range(MOST_STEPS + 5):
        timer.mark("input")
        timer.mark("backward")
        profiler.add(8 if step < 10 else 4)
    window = profiler.exchange(MOST_STEPS + 5)
    assert window.values.shape == (1, MOST_STEPS, len(FIELDS))
    assert window.field("samples").sum() == 4 * MOST_STEPS + 5 * 4


def test_what_is_submitted_happens_in_order_and_an_error_ends_it_all() -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("[../gloo/pair.cc:534] Connection reset by peer. This is typically due to …")

    group, done, gate = InterruptibleGroup(0, 1, NoTransport), list[int](), threading.Event()  # type: ignore[arg-type]
    group.submit("wait", lambda _: gate.wait(60))
    futures = [group.submit("count", lambda _, number=number: done.append(number)) for number in range(50)]  # type: ignore[misc]
    failing, after = group.submit("all-reduce", broken), group.submit("count", lambda _: done.append(99))
    gate.set()
    assert [future.result(60) for future in futures] == [None] * 50
    for future in (failing, after):
        assert isinstance(future.exception(60), GroupError)
    assert str(failing.exception()).endswith(" s: RuntimeError: Connection reset by peer."), "in short words"
    assert done == list(range(50))
    group.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL"])
def test_a_process_that_freezes_or_dies_in_the_middle(how: str) -> None:
    """A frozen one is not noticed by gloo: somebody else has to call the group off. A dead one is, at once."""
    listener = open_listener("127.0.0.1")
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, None, True, master_listen_fd=listener.detach(), wait_for_workers=False)
    group = InterruptibleGroup(0, 2, lambda: make_torch_transport(store, 0, 2, None, NEVER, NEVER, "127.0.0.1"))
    peer = Forked(PEER, str(port), how)
    try:
        group.run("all-reduce", lambda transport: transport.all_reduce(torch.ones(1)))
        waiting = blocked(lambda: group.run("barrier", lambda transport: transport.barrier(NEVER)))
        if how == "SIGSTOP":
            until(lambda: psutil.Process(peer.pid).status() == psutil.STATUS_STOPPED)
            while_it_does(group, "barrier")
            assert not waiting.done()
            group.fail("the peer is silent")
        error = waiting.exception(60)
        assert isinstance(error, GroupError)
        assert error.detail["operation"] == "barrier"
        assert ("the peer is silent" in str(error)) == (how == "SIGSTOP")
    finally:
        peer.kill()
        group.close()
