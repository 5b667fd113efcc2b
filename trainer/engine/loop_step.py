"""`LoopStep`: the step of a loop of the caller's own, which computes losses and calls the optimizers itself.

A step is `begin`, then what the caller does by `backward`, `gather`, `sum_gradients` and `take_optimizer_step`, then
`complete`, or `discard` where it failed. Gradients are summed over ranks when an optimizer needs them. With one
optimizer its step is the commit: its update follows at once. With several, the batch is the transaction: each update
is made as it is asked for, what it changes is kept before, and the commit comes at the end. The public interface is
`trainer.loop`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.comm.group import is_communication_error, shorten_error
from trainer.comm.world import World
from trainer.config import ConfigError
from trainer.data.batches import Batch, Samples
from trainer.data.sampler import micro_batch_seed
from trainer.engine.loop_optimizers import LoopOptimizer, LoopOptimizers
from trainer.engine.module_state import put_module_state, read_module_state
from trainer.engine.out_of_memory import is_out_of_memory
from trainer.engine.precision import tf32_products
from trainer.engine.step import TrainingStep
from trainer.engine.steps import StepFlags, StepResult, explain_non_finite
from trainer.model.task import per_sample
from trainer.parallel.synchronizer import GradientSync

_BY_HAND = "change it after optimizer.step() within `with batch:`, or in the method on_step of a callback"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopParts:
    """What a caller's loop trains with."""

    optimizers: Sequence[Optimizer]
    schedulers: Sequence[Any]
    """Of each optimizer; None where it has none."""
    registered: Mapping[str, Any] = field(default_factory=dict)
    """What else has a state, by name."""
    steps_several: bool = False
    """Whether a batch may have several steps of optimizers, which are then taken back together."""


class LoopStep(TrainingStep):
    """The step of a loop of the caller's own."""

    def __init__(self, *given: Any, parts: LoopParts) -> None:
        """``given``: as `TrainingStep` takes it."""
        self.parts = parts
        super().__init__(*given)
        self._weights = dict(self.module.named_parameters())
        self._versions: dict[str, int] = {}
        self._moved: list[int | None] | None = None
        self._around = ExitStack()
        self._batch: Batch | None = None
        self._flags, self._step = StepFlags(), 0
        self._current: Samples | None = None
        self._result: StepResult | None = None
        self._before: Any = {}
        self._attached: dict[str, Any] = {}
        self._sums: list[Tensor] = []
        self._norms: list[float] = []
        self._passes = 0
        self._is_updated = False
        """Whether the update of a committed step was made, so that it cannot be done again."""

    @property
    def batch(self) -> Batch:
        """The batch of the step. Raise `ConfigError` between two steps."""
        if self._batch is None:
            raise ConfigError("this belongs into the block `with batch:` of a loop")
        return self._batch

    def begin_epoch(self) -> None:
        """The caller sets the modes of modules."""

    def adopt(self, world: World) -> None:
        """Work in this world from now on; waits for its group."""
        self.world = world
        for part in self.optimizers:
            part.adopt(world, self.faults, self.timer)
        [first, *_] = self.optimizers
        assert first.sync is not None
        # With one optimizer its step is the commit, which tells of its gradients.
        self.sync = GradientSync(world, self.faults, self.timer) if self.parts.steps_several else first.sync

    def begin(self, batch: Batch, step: int, flags: StepFlags) -> None:
        """Begin a step. Raise `ConfigError` where a parameter was changed since the last one."""
        self.timer.mark("input")
        self._batch, self._step, self._flags = batch, step, flags
        self._result, self._current, self._passes = None, None, 0
        self._sums, self._norms, self._is_updated = [], [], False
        for part in self.optimizers:
            part.begin(step)
        if self._moved is None:
            self.note_versions()
        else:
            self._refuse_changes("outside `with batch:`")
            if self._moved != [part.schedule_step for part in self.optimizers]:
                raise ConfigError(
                    "a scheduler moved on outside `with batch:`, where no checkpoint holds it: step it in the block"
                )
        self._before = read_module_state(self._holders) if self._holders else {}
        self._attached = {name: copy.deepcopy(each.state_dict()) for name, each in self.parts.registered.items()}
        if self.config.precision == "tf32":
            self._around.enter_context(tf32_products())
        self._seed(micro_batch_seed(self.config.seed, step, batch.micro_batches[0].number, -1))

    def micro_batches(self) -> Iterator[Any]:
        """Yield the data of this rank's micro-batches, each with its own seed."""
        number, self._passes = self._passes, self._passes + 1
        for part in self.batch.micro_batches:
            self._current = part
            self._seed(micro_batch_seed(self.config.seed + (number << 32), self._step, part.number, part.place))
            self.faults.reach("forward", self._step)
            yield part.data
        self._current = None

    def backward(self, losses: Tensor, retain_graph: bool = False) -> None:
        """Add the gradients of this rank's part of the mean over the global batch."""
        batch = self.batch
        if self._result is not None:
            raise ConfigError("loop.backward after the optimizer's step of this batch: its gradients would be lost")
        if any(part.is_summed for part in self.optimizers):
            raise ConfigError("loop.backward between loop.clip_gradients and optimizer.step: add all gradients first")
        count = batch.local_samples if self._current is None else self._current.count
        if not isinstance(losses, Tensor):
            raise ConfigError(f"loop.backward was given a {type(losses).__name__}: give losses, one for each sample")
        total = losses * count if losses.dim() == 0 else per_sample(losses, count, "loop.backward").sum()
        self._sums.append(total.detach())
        self.timer.mark("forward")
        self.faults.reach("backward", self._step)
        (total / batch.samples).backward(retain_graph=retain_graph)
        self.timer.mark("backward")

    def gather(self, given: Tensor | Sequence[Tensor]) -> Tensor:
        """Return rows of all ranks, in the order of micro-batches. Gradients flow back to the ranks."""
        if self._result is not None:
            raise ConfigError("loop.gather after the optimizer's step of this batch, which is committed: gather before")
        micro_batches = self.batch.micro_batches if self._current is None else (self._current,)
        rows = [given] if isinstance(given, Tensor) else list(given)
        if len(rows) != len(micro_batches):
            if len(rows) != 1 or len(rows[0]) != self.batch.local_samples:
                raise ConfigError(
                    f"loop.gather was given {len(rows)} tensors, and this rank has {len(micro_batches)} micro-batches: "
                    "give one tensor for each, or one with a row for each sample of this rank"
                )
            rows = list(rows[0].split([part.count for part in micro_batches]))
        if self._current is not None and self.world.world_size > 1:
            raise ConfigError(
                "loop.gather while micro-batches are read: ranks may have several or fewer of them, so collect "
                "[… for part in batch] first, and gather the list"
            )
        starts, total = self._places(micro_batches, [len(each) for each in rows])
        gathered: Tensor = _Gather.apply(self.world, total, starts, *rows)
        return gathered

    def own_rows(self) -> Tensor:
        """Return the places of this rank's samples among those of the global batch (n,), in the order of `gather`."""
        if self._result is not None:
            raise ConfigError("loop.own_rows after the optimizer's step of this batch, which is committed: ask before")
        parts = self.batch.micro_batches
        starts, _ = self._places(parts, [part.count for part in parts])
        found = [torch.arange(at, at + part.count) for at, part in zip(starts, parts, strict=True)]
        return torch.cat(found).to(self.device)

    def clip_gradients(self, part: LoopOptimizer, max_norm: float | None, clip_value: float | None) -> float:
        """Sum the gradients of an optimizer, clip them, and return the norm that they had."""
        if self._result is not None:
            raise ConfigError("loop.clip_gradients after the optimizer's step of this batch: clip before")
        part.sum_gradients()
        return part.clip(max_norm, clip_value)

    def take_optimizer_step(self, part: LoopOptimizer) -> None:
        """Update with the sums of gradients. With one optimizer this commits the step."""
        if self._result is not None:
            raise ConfigError(
                "the optimizer steps a second time in one batch: Loop(…, several_steps=True) keeps what is needed to "
                "take all of a batch's steps back together"
            )
        batch = self.batch
        part.sum_gradients()
        self._norms.append(part.norm)
        if self.parts.steps_several:
            self._agree_on(part)
            self._refuse_changes("before optimizer.step()")
            part.keep()
        else:
            assert part.sync is not None
            self.sync = part.sync  # another one, where parameters were frozen or unfrozen
            self._refuse_changes("before optimizer.step()")
            self._result = self._commit_step(batch)
        self.faults.reach("optimizer", self._step)
        part.optimizer.step()
        part.clear()
        self._is_updated = self._result is not None
        self.timer.mark("optimizer")

    def stop(self) -> None:
        """Have the training end after this step, on all ranks."""
        if self._result is not None:
            raise ConfigError("loop.stop() after the optimizer's step of this batch, which is committed: stop before")
        self._flags = replace(self._flags, ending=1)

    def complete(self) -> StepResult:
        """End the step, and commit it if that was not done. Raise `ConfigError` where its gradients were not used."""
        if self._sums and not self._norms:
            raise ConfigError(
                "no optimizer has used the gradients of this batch: call optimizer.step() in each. For larger batches "
                "raise training.gradient_accumulation_steps, or batch_size_per_gpu"
            )
        if self._result is None:
            self._refuse_changes("before the step was committed")
            self._result = self._commit_step(self.batch)
        result = self._result
        self._end()
        return result

    def discard(self, error: BaseException) -> BaseException:
        """Be as before the step, as far as that is not committed, and return what has failed: the group, or what was
        raised."""
        peers = self.world.group
        if peers is not None and is_communication_error(error):
            peers.fail(shorten_error(error))  # first, since a broken GPU may refuse all that follows
        if self._result is None:
            for part in self.optimizers:
                part.put_back()
            put_module_state(self._holders, self._before)
            for name, each in self.parts.registered.items():
                each.load_state_dict(self._attached[name])
        self.timer.drop()
        self._end()
        if self._is_updated:  # what goes on by doing the step again would make its update twice
            return _explain_late(error) if is_out_of_memory(error) else error
        return error if peers is None or peers.error is None else peers.error

    def note_versions(self) -> None:
        """Remember how often parameters were changed, and how far schedules have moved."""
        # The counter by which autograd finds changes in place; there is no public name for it.
        self._versions = {name: each._version for name, each in self._weights.items()}
        self._moved = [part.schedule_step for part in self.optimizers]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the optimizers."""
        return {"optimizer": self.scheduled.state_dict(), "scaler": {}}  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` has returned."""
        self.scheduled.load_state_dict(state["optimizer"])  # type: ignore[attr-defined]

    def release(self) -> None:
        """Leave the models as any others: without gradients."""
        for part in self.optimizers:
            if part.sync is not None:
                part.sync.unwrap()
            part.optimizer.zero_grad(set_to_none=True)

    def run_alone(self, data: Any, count: int) -> None:
        """What a pass is only the caller's loop knows."""
        raise RuntimeError("a loop of its own is not tried by itself")

    def _make_optimizer(self) -> Any:
        given = zip(self.parts.optimizers, self.parts.schedulers, strict=True)
        self.optimizers = [LoopOptimizer(optimizer, scheduler, self.config) for optimizer, scheduler in given]
        return LoopOptimizers(self.optimizers)

    def _make_graphs(self) -> None:
        return None

    def _places(self, parts: Sequence[Samples], lengths: Sequence[int]) -> tuple[list[int], int]:
        """Return where the rows of these micro-batches begin among those of all ranks, and how many there are. A
        collective."""
        mine = [[part.number, part.place, length] for part, length in zip(parts, lengths, strict=True)]
        places: dict[tuple[int, int], int] = {}
        total = 0
        for number, place, length in sorted(
            tuple(each) for rank in self.world.all_gather_object(mine) for each in rank
        ):
            places[number, place], total = total, total + length
        return [places[number, place] for number, place, _ in mine], total

    def _agree_on(self, part: LoopOptimizer) -> None:
        """Agree on the gradients of an optimizer, before its update. A collective."""
        assert part.sync is not None
        broken = not math.isfinite(part.norm)
        counts = torch.tensor([int(broken), *part.sync.missing_flags()], dtype=torch.int64)
        broken_on, *without = self.world.all_reduce(counts, "gradients of an optimizer").tolist()
        if broken_on:
            raise self._explain(part.norm)
        part.sync.drop_unused(without)

    def _commit_step(self, batch: Batch) -> StepResult:
        loss_sum = sum(each.item() for each in self._sums)
        norm = math.hypot(*self._norms)
        result = self._agree(batch, self._flags, loss_sum, batch.local_samples, norm)
        self.timer.mark("exposed")
        if result is None:
            raise self._explain(norm)
        return result

    def _explain(self, norm: float) -> Exception:
        return explain_non_finite(self._step, self.scheduled.rate, norm, self._find_odd(self.batch))

    def _refuse_changes(self, when: str) -> None:
        """Raise `ConfigError` where a parameter was changed that is not kept: that could not be taken back."""
        kept = {id(each) for part in self.optimizers if part.is_kept for each in part.parameters}
        for name, each in self._weights.items():
            if each._version != self._versions[name] and id(each) not in kept:
                raise ConfigError(f"{name} was changed {when}, and a discarded step could not take it back: {_BY_HAND}")

    def _end(self) -> None:
        self._around.close()
        self._batch = self._current = None
        self._sums = []


def _explain_late(error: BaseException) -> BaseException:
    """Return the error of a block in which memory ran out after its step."""
    late = RuntimeError(
        f"memory ran out after optimizer.step(), whose batch is committed and cannot be done again in smaller parts: "
        f"do less after it in the block, or lower training.batch_size_per_gpu ({error})"
    )
    late.__cause__ = error
    return late


class _Gather(torch.autograd.Function):
    """Rows of all ranks; its backward sums the gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, world: World, total: int, starts: Sequence[int], *rows: Tensor) -> Tensor:
        ctx.world, ctx.edges = world, [(at, at + len(each)) for at, each in zip(starts, rows, strict=True)]
        whole = rows[0].new_zeros(total, *rows[0].shape[1:])
        for (begin, end), each in zip(ctx.edges, rows, strict=True):
            whole[begin:end] = each
        return world.all_reduce(whole, "gathered rows")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        whole = ctx.world.all_reduce(gradients[0].contiguous().clone(), "gradients of gathered rows")
        return (None, None, None, *(whole[begin:end] for begin, end in ctx.edges))
