"""Collectives on a device whose work completes late and out of order: a stand-in, since no GPU is here.

Each thread has a stream, which does what it was given, one after the other, on a thread of its own and after pauses.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from steps import step_of
from thread_worlds import NoTransport, at_once, gloo_openers
from torch import Tensor, nn

from harness.waiting import until
from trainer.comm.group import GroupError, InterruptibleGroup
from trainer.comm.launcher_env import RankFacts
from trainer.comm.torch_transport import TorchTransport, abort_each, end_within
from trainer.comm.world import World
from trainer.data.batches import Batch, Samples
from trainer.engine.module_state import digest_state_dict
from trainer.engine.steps import NonFiniteError, StepFlags
from trainer.observability.comm_profiler import CommunicationProfiler
from trainer.runtime.step_timer import StepTimer

CPU = torch.device("cpu")


class LateDevice:
    """A `trainer.comm.device_events.DeviceEvents`."""

    def __init__(self, seed: int = 0, pause: float = 1e-3) -> None:
        self._local, self._chance, self._pause = threading.local(), random.Random(seed), pause
        self.gate = threading.Event()
        self.gate.set()
        self.error = ""

    def submit(self, work: Callable[[], object]) -> None:
        """Have the stream of this thread do it."""
        if not hasattr(self._local, "work"):
            self._local.work = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self._local.work,), daemon=True).start()
        self._local.work.put(work)

    def _run(self, todo: queue.SimpleQueue[Callable[[], object]]) -> None:
        while True:
            work = todo.get()
            time.sleep(self._chance.uniform(0, self._pause))
            self.gate.wait()
            work()

    def record(self) -> Any:
        event = threading.Event()

        def done() -> None:
            event.at = time.monotonic()  # type: ignore[attr-defined]
            event.set()

        self.submit(done)
        return event

    def follow(self, event: Any) -> None:
        self.submit(event.wait)

    def is_done(self, event: Any) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return bool(event.is_set())

    def seconds_between(self, first: Any, second: Any) -> float:
        assert first.is_set()
        assert second.is_set()
        return float(second.at - first.at)

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        found = torch.zeros_like(tensor)
        self.submit(lambda: found.copy_(tensor))
        return found


class LateTransport(NoTransport):
    """Doubles tensors, as a sum over two equal ranks does, on the stream of the thread that calls it."""

    linger_seconds = 60.0

    def __init__(self, device: LateDevice) -> None:
        self.device, self.aborts = device, threading.Event()

    def all_reduce(self, tensor: Tensor) -> None:
        self.device.submit(lambda: tensor.mul_(2))

    def abort(self) -> None:
        self.aborts.set()


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


@pytest.fixture
def group(device: LateDevice) -> Iterator[InterruptibleGroup]:
    made = InterruptibleGroup(0, 2, lambda: LateTransport(device), events=device)  # type: ignore[arg-type,return-value]
    until(lambda: made.transport)
    yield made
    device.gate.set()
    made.fail("the test is over")
    made.close()


def test_sums_follow_what_they_are_of_and_come_before_what_is_made_of_them(
    device: LateDevice, group: InterruptibleGroup
) -> None:
    buffers, found = [torch.zeros(4) for _ in range(3)], []
    for number in range(20):
        outcomes = []
        for place, buffer in enumerate(buffers):
            device.submit(lambda buffer=buffer, value=number + place: buffer.fill_(value))  # type: ignore[misc]
            outcomes.append(group.all_reduce(f"bucket {place}", buffer))
        for outcome, buffer in zip(outcomes, buffers, strict=True):
            outcome.result()
            device.submit(lambda buffer=buffer: found.append(buffer.clone()))  # type: ignore[misc]
    group.wait()
    assert [int(each[0]) for each in found] == [2 * (number + place) for number in range(20) for place in range(3)]


def test_the_host_waits_at_one_place_only(device: LateDevice, group: InterruptibleGroup) -> None:
    device.gate.clear()
    values = torch.ones(2)
    assert group.all_reduce("bucket 0", values).result() is values
    assert group.all_reduce("bucket 1", values).exception() is None
    assert torch.equal(values, torch.ones(2))
    threading.Timer(0.1, device.gate.set).start()
    [read] = group.fetch(values)
    assert torch.equal(read, torch.full((2,), 4.0))


def test_a_group_that_fails_frees_who_waits_for_the_device_and_aborts(
    device: LateDevice, group: InterruptibleGroup
) -> None:
    device.gate.clear()
    values = torch.ones(2)
    group.all_reduce("bucket 0", values).result()
    threading.Timer(0.1, group.fail, ["a peer is lost"]).start()
    with pytest.raises(GroupError, match="a peer is lost") as caught:
        group.fetch(values)
    assert caught.value.detail["operation"] == "waiting for the device"
    assert isinstance(group.transport, LateTransport)
    assert group.transport.aborts.wait(60)


def test_what_an_interrupted_sum_leaves_behind_is_no_result(device: LateDevice, group: InterruptibleGroup) -> None:
    values = torch.ones(2)
    group.all_reduce("bucket 0", values).result()
    until(lambda: float(values[0]) == 2.0)
    group.fail("a peer is lost")
    with pytest.raises(GroupError, match="a peer is lost"):
        group.fetch(values)


def test_a_device_that_fails_and_a_sum_that_never_ends_fail_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.comm.group.LOOK_SECONDS", 0.01)
    failing, silent, gone = LateDevice(), LateDevice(), threading.Event()
    failing.error = "CUDA error: an illegal memory access was encountered"
    cases = ((failing, 60.0, "illegal memory access"), (silent, 0.05, "bucket 0 was not done after"))
    for each, seconds, why in cases:
        transport = LateTransport(each)
        transport.linger_seconds = seconds
        group = InterruptibleGroup(0, 2, lambda transport=transport: transport, events=each)  # type: ignore[misc]
        until(lambda group=group: group.transport)
        group.submit("bucket 0", lambda _, each=each: each.submit(gone.wait)).result()  # type: ignore[misc]
        with pytest.raises(GroupError, match=why):
            group.wait()
        group.close()
    gone.set()


def test_a_step_that_computes_for_long_is_no_failure_of_its_peers(
    device: LateDevice, group: InterruptibleGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.comm.group.LOOK_SECONDS", 0.01)
    assert isinstance(group.transport, LateTransport)
    group.transport.linger_seconds = 0.05
    computed, values = threading.Event(), torch.ones(2)
    device.submit(computed.wait)
    group.all_reduce("bucket 0", values).result()
    threading.Timer(0.5, computed.set).start()
    [read] = group.fetch(values)
    assert torch.equal(read, torch.full((2,), 2.0))


def test_times_are_those_of_the_device_and_read_at_the_end_of_a_window(
    device: LateDevice, group: InterruptibleGroup
) -> None:
    def slow(transport: Any) -> None:
        with group.computing():
            device.submit(lambda: time.sleep(0.05))
        device.submit(lambda: time.sleep(0.1))

    world = World(RankFacts(), CPU, "nccl", group=group)
    timer = StepTimer(True, CPU)
    profiler = CommunicationProfiler(world, timer)
    timer.mark("input")
    timer.mark("backward")
    group.submit("all-reduce of gradient bucket 0", slow).result()
    timer.mark("exposed")
    profiler.add(8)
    [item] = profiler._steps[0][1]
    assert item.ended is None
    assert item.events
    group.settle([item])
    assert item.began is not None
    assert item.ended is not None
    assert item.ended - item.began >= 0.15
    assert 0.05 <= item.computing < item.ended - item.began
    assert not item.events


class Odd(nn.Module):
    """A loss that is infinite for one target, with a finite gradient."""

    AT = 5.0

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs[:, 0] - target) ** 2 + torch.where(target == self.AT, torch.inf, 0.0)


@pytest.mark.parametrize("poison", [False, True])
def test_a_step_commits_on_the_device_as_it_does_on_the_host(poison: bool) -> None:
    def work(world: World) -> Any:
        step = step_of(nets[world.rank], world, Odd(), world_size=2)
        found = []
        for number in range(4):
            inputs, target = torch.full((4, 3, 2), 0.1 * (1 + world.rank + number)), torch.ones(4)
            if poison and number == 2 and world.rank == 1:
                target[0] = Odd.AT  # whose gradient is finite
            batch = Batch(8, (Samples(0, 4, (inputs, target)),), digest=world.rank + 1)
            try:
                found.append(step(batch, number, 0.1, StepFlags(leaving=world.rank)))
            except NonFiniteError as error:
                return found, str(error), digest_state_dict(step.module.state_dict())
        return found, "", digest_state_dict(step.module.state_dict())

    results = []
    for late in (None, LateDevice()):
        nets = [nn.Sequential(nn.Flatten(), nn.Linear(6, 1)) for _ in range(2)]
        for net in nets:
            for parameter in net.parameters():
                nn.init.constant_(parameter, 0.3)
        groups = [InterruptibleGroup(rank, 2, opener, events=late) for rank, opener in enumerate(gloo_openers(2))]
        worlds = [World(RankFacts(rank=group.rank, world_size=2), CPU, "gloo", group=group) for group in groups]
        results.append(at_once(work, worlds))
        for group in groups:
            group.fail("the test is over")
            group.close()
    assert results[0] == results[1]
    (found, error, weights), (_, other_error, other_weights) = results[1]
    assert weights == other_weights
    assert len(found) == (2 if poison else 4)
    assert ("is not finite at step 3" in error) == ("is not finite at step 3" in other_error) == poison
    assert {(each.flags.leaving, each.digest) for each in found} == {(1, 3)}


class Waits:
    """A backend whose abort ends once those of all others have begun."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self.abort = barrier.wait


def test_groups_are_aborted_all_at_once_and_are_not_waited_for_without_end() -> None:
    assert end_within(abort_each([]), 0.0)
    barrier = threading.Barrier(3)
    assert end_within(abort_each([Waits(barrier) for _ in range(3)]), 60.0)
    stuck = threading.Barrier(2)
    threads = abort_each([Waits(stuck)])
    assert not end_within(threads, 0.05)
    stuck.wait(60)
    assert end_within(threads, 60.0)


def test_a_transport_is_aborted_once_however_often_it_is_asked() -> None:
    count = []

    class Group:
        def _get_backend(self, _: Any) -> Any:
            return type("Backend", (), {"abort": lambda self: count.append(1)})()

    transport = TorchTransport.__new__(TorchTransport)
    vars(transport).update(
        group=Group(), _gpu=CPU, _levels=None, _subgroups={(0,): Group()}, _aborting=threading.Lock(), _aborts=[]
    )
    for _ in range(2):
        transport.abort()
    assert len(count) == 2
