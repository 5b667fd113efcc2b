"""What an optimizer step costs beyond its bound, in counts that no machine changes: Python calls, operations, bytes
that are gathered, and collectives. The bound is the same forward and backward pass, clipping and update, on a batch
that is there already."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import step_of
from thread_worlds import CPU, on_two_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.worlds import Job
from trainer.comm.world import World
from trainer.config import FactoryConfig, parse_job
from trainer.data.batches import Batch
from trainer.data.loader import BatchLoader
from trainer.data.sampler import Sampler
from trainer.data.shards import DataShardManager
from trainer.engine.steps import StepFlags, Steps
from trainer.engine.trainer import DistributedTrainer
from trainer.model.build import build_loss, build_model
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer

SIZE, STEPS = 64, 12
MORE_CALLS = 170
"""Calls of functions, written in Python or in C, that a whole step makes beyond the bound for its input and its
bookkeeping: as many as when this was written, and some twenty, since which ones an interpreter counts differs between
versions of Python."""


class Operations(TorchDispatchMode):
    """Counts operations, and the bytes of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = str(function.overloadpacket)
        self.count[name] += 1
        self.bytes[name] += sum(item.nbytes for item in tree_leaves(result) if isinstance(item, torch.Tensor))
        return result


@contextmanager
def python_calls(counted: Counter[str]) -> Iterator[None]:
    def note(_: Any, event: str, __: Any) -> None:
        counted[event] += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


class Counting(DistributedTrainer):
    """Counts what happens between one batch and the next; ``with_`` is opened at each."""

    def count(self, with_: Callable[[], Any]) -> None:
        self.counted: list[Any] = []
        self._with = with_

    def epoch_steps(self, dataloader: Iterable[Batch], epoch: int) -> Steps[dict[str, float]]:
        return super().epoch_steps(self._between(dataloader), epoch)

    def _between(self, dataloader: Iterable[Batch]) -> Iterator[Batch]:
        batches = iter(dataloader)
        batch = next(batches, None)
        while batch is not None:
            self.batch = batch
            with self._with() as found:
                yield batch
                batch = next(batches, None)
            self.counted.append(found)


def trained(job: Job, with_: Callable[[], Any]) -> Counting:
    """A training of a few steps, counted."""
    trainer = Counting(parse_job(job.write().read_text()))
    trainer.count(with_)
    trainer.initialize_distributed()
    try:
        trainer.setup()
        trainer.train()
    finally:
        trainer.close()
    return trainer


def bound(trainer: DistributedTrainer, batch: Batch) -> None:
    """A step as it is written with torch alone."""
    step = trainer.session.step
    step.optimizer.zero_grad(set_to_none=True)
    for part in batch.micro_batches:
        (step.task.loss(step.module, part.data).sum() * (1 / batch.samples)).backward()
    torch.nn.utils.clip_grad_norm_(step.parameters, 0.5)
    step.optimizer.step()


@pytest.fixture
def job(new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> Job:
    made = new_job(
        world_size=1, gradient_accumulation_steps=1, batch_size_per_gpu=SIZE, max_steps=STEPS, log_frequency=1000,
        checkpoint_frequency=1000, clip_norm=1e9,
    )  # fmt: skip
    monkeypatch.setenv("DTRAIN_CACHE", made.environment["DTRAIN_CACHE"])
    return made


def test_a_step_makes_few_calls_beyond_its_bound(job: Job) -> None:
    @contextmanager
    def calls() -> Iterator[Counter[str]]:
        counted: Counter[str] = Counter()
        with python_calls(counted):
            yield counted

    trainer = trained(job, calls)
    with calls() as needed:
        bound(trainer, trainer.batch)
    typical = sorted(item.total() for item in trainer.counted)[STEPS // 2]
    assert typical <= needed.total() + MORE_CALLS


def test_a_step_makes_no_more_operations_than_its_bound_and_gathers_no_byte_twice(job: Job) -> None:
    trainer = trained(job, Operations)
    with Operations() as needed:
        bound(trainer, trainer.batch)
    made = trainer.counted[-3]
    for each in (made, needed):
        del each.count["aten.view"]  # which touches no data: a norm of many tensors is sooner computed of one
    assert made.count.total() <= needed.count.total()
    data = trainer.session.problem.data
    assert isinstance(data, DataShardManager)
    spec = data.spec
    assert made.bytes["aten.index_select"] == SIZE * (spec.window * len(spec.features) + 1) * 4
    assert sum(made.bytes.values()) <= 1.05 * sum(needed.bytes.values()) + made.bytes["aten.index_select"]


def test_two_ranks_exchange_their_gradients_and_one_line_and_nothing_else(dataset: Path, cache: Path) -> None:
    shards = DataShardManager(str(dataset), cache)
    criterion = build_loss(FactoryConfig(factory="student_t"), shards.spec)
    models = [build_model(FactoryConfig(factory="tcn"), shards.spec, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def work(world: World) -> list[tuple[str, int]]:
        faults, timer = Faults({}, 0), StepTimer(False, CPU)
        sampler = Sampler(
            samples=shards.count("train"), global_batch_size=64, micro_batches=4, seed=0, rank=world.rank, world_size=2
        )
        step = step_of(models[world.rank], world, criterion, world_size=2, batch_size_per_gpu=16)
        assert world.group is not None
        before = len(world.group.collectives)
        batches = BatchLoader(shards.make_reader(CPU, None), sampler, CPU, faults, timer).batches(0, 0, 0)
        for number in range(3):
            step(next(batches), number, 1e-3, StepFlags())
        return [(item.what.split(" (")[0], item.bytes) for item in list(world.group.collectives)[before:]]

    [one, other] = on_two_ranks(work)
    gradients = ("all-reduce of gradient bucket 0", sum(parameter.nbytes for parameter in models[0].parameters()))
    line = ("commit of the step", 8 * (8 + len(list(models[0].parameters()))))
    assert one == other == 3 * [gradients, line]
