"""`Loop`: a training loop of the caller's own, with all that `trainer.Trainer` gives, for what no loss per sample says:
GANs, reinforcement learning, contrastive losses over ranks.

    loop = Loop({"epochs": 10}, run_dir="runs/own")
    model, optimizer = loop.setup(model, optimizer)
    for batch in loop.batches(train):
        with batch:
            for inputs, target in batch:
                loop.backward(loss(model(inputs), target))
            optimizer.step()

The public entrance for such scripts belongs here; how a step is made is `trainer.engine.loop_step`, and what a script's
training has in common with `Trainer.fit` is `trainer.fit`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from trainer.comm.group import GroupError
from trainer.config import ConfigError, DistributedTrainingConfig, TrackingConfig
from trainer.engine.callbacks import Run
from trainer.engine.loop_step import LoopOptimizer, LoopParts, LoopStep
from trainer.engine.out_of_memory import is_out_of_memory
from trainer.engine.precision import AUTOCAST
from trainer.engine.steps import DueStep, NonFiniteError, Steps
from trainer.fit import FitResult
from trainer.loop_training import LoopTrainer, Score


class LoopLeftError(RuntimeError):
    """The loop was left by ``break``, ``return`` or an error before its end."""


class LoopBatch:
    """This rank's part of a global batch. What is done in its ``with`` block counts on all ranks, or on none: where a
    node is lost meanwhile the block is left, and the loop goes on with the same samples, dealt anew.

    Iterating it gives the data of each micro-batch, as the collate function makes them, on the device. Random numbers
    are seeded for each, so that they are the same on whichever rank. It may be iterated several times."""

    def __init__(self, loop: Loop, due: DueStep) -> None:
        self._loop, self._due = loop, due
        self.step = due.number
        """Optimizer steps done before it, over all epochs. It comes again where it was not committed."""
        self.epoch = due.epoch
        """From 0."""
        self.samples = due.batch.samples
        """In the global batch, over all ranks."""
        self.local_samples = due.batch.local_samples
        """Of this rank."""
        self.committed = False
        """Whether the block was left with a step that is done on all ranks."""
        self.was_entered = False

    def __enter__(self) -> LoopBatch:
        self._loop._enter(self, self._due)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        return self._loop._leave(self, error)

    def __iter__(self) -> Iterator[Any]:
        return self._loop.step.micro_batches()


class WrappedOptimizer:
    """An optimizer of a loop: `step` sums its gradients over ranks first. All else is the optimizer's own."""

    def __init__(self, loop: Loop, optimizer: Optimizer) -> None:
        self._loop, self.optimizer = loop, optimizer

    def step(self, closure: None = None) -> None:
        """Update the parameters, and forget their gradients. With one optimizer, this commits the batch."""
        if closure is not None:
            raise ConfigError("optimizer.step takes no closure in a loop that goes on when nodes are lost")
        self._loop.step.take_optimizer_step(self._loop._part_of(self))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as each batch and each step of this optimizer does by itself."""
        self._loop._part_of(self).clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group before `Loop.batches`. Raise `ConfigError` later, when what sums and keeps them is made."""
        if self._loop._steps is not None:
            raise ConfigError(
                "optimizer.add_param_group after loop.batches: give all groups before, frozen by requires_grad = False "
                "as long as they are not to be trained"
            )
        self.optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class Loop:
    """A training whose loop is the caller's own.

    It runs in one process, under torchrun, `dtrain launch` and `dtrain train --script`, and keeps what `Trainer` keeps:
    each sample once per epoch at any number of ranks, checkpoints and resume of all that was set up, a node that is
    lost costs the step it was in. The strategy is ``ddp``.
    """

    def __init__(
        self,
        config: DistributedTrainingConfig | Mapping[str, Any] | None = None,
        *,
        several_steps: bool = False,
        callbacks: Sequence[Any] = (),
        run_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        tracking: TrackingConfig | Mapping[str, Any] | None = None,
        progress: bool | None = None,
    ) -> None:
        """Arguments are those of `Trainer`; settings of its optimizer, schedule and clipping are refused.

        ``several_steps``: whether an optimizer steps several times in a batch. With that, and with several optimizers,
        parameters and moments are kept before the first step of each, and the batch is committed at the end of its
        block. Without, ``optimizer.step()`` commits it."""
        self._given: dict[str, Any] = {
            "config": config, "run_dir": run_dir, "name": name, "tracking": tracking, "progress": progress,
        }  # fmt: skip
        self._callbacks, self._several_steps = tuple(callbacks), several_steps
        self._modules: dict[str, nn.Module] = {}
        self._optimizers: list[WrappedOptimizer] = []
        self._schedulers: list[Any] = []
        self._registered: dict[str, Any] = {}
        self._steps: Steps[FitResult] | None = None
        self._due: DueStep | None = None
        self._step: LoopStep | None = None
        self._run: Run | None = None
        self._failed: BaseException | None = None
        self.result: FitResult | None = None
        """How the training ended; None until it has."""

    def setup(self, *parts: Any) -> Any:
        """Return modules, optimizers and schedulers as they are used in the loop, in the order given: one alone, or a
        tuple. Modules are moved to the device when `batches` begins. A scheduler is one of torch's, of an optimizer
        that is given, too; the loop calls its ``step``. Raise `ConfigError` for anything else."""
        if self._steps is not None:
            raise ConfigError("call loop.setup before loop.batches")
        made = [self._set_up(part) for part in parts if not isinstance(part, LRScheduler | ReduceLROnPlateau)]
        coming = iter(made)
        found = [
            self._set_up_scheduler(part) if isinstance(part, LRScheduler | ReduceLROnPlateau) else next(coming)
            for part in parts
        ]
        return found[0] if len(found) == 1 else tuple(found)

    def register(self, **parts: Any) -> None:
        """Have further objects kept in checkpoints and given to nodes that join, by name: they have ``state_dict`` and
        ``load_state_dict``. Their state is copied before each batch, so that a discarded one changes nothing."""
        if self._steps is not None:
            raise ConfigError("call loop.register before loop.batches, which loads their states")
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise ConfigError(
                    f"loop.register({name}=…): a {type(part).__name__} needs state_dict and load_state_dict"
                )
            if isinstance(part, nn.Module | Optimizer | WrappedOptimizer | LRScheduler):
                raise ConfigError(f"loop.register({name}=…): give a {type(part).__name__} to loop.setup")
            self._registered[name] = part

    def batches(
        self,
        train: Dataset[Any] | DataLoader[Any],
        valid: Dataset[Any] | DataLoader[Any] | None = None,
        test: Dataset[Any] | DataLoader[Any] | None = None,
        *,
        score: Score | None = None,
    ) -> Iterator[LoopBatch]:
        """Yield each batch, through all epochs of the settings; afterwards `result` is there. A batch that was not
        committed comes again, so a count of the loop's own counts it twice.

        ``score`` evaluates a micro-batch of ``valid``, by which the best weights are chosen (`Trainer`, ``monitor`` in
        the settings), and of ``test``. Raise as `Trainer.fit`."""
        if self._steps is not None:
            raise ConfigError("loop.batches goes through all epochs, and is called once: read batch.epoch")
        trainer = LoopTrainer(*self._parts(), score, callbacks=(self, *self._callbacks), **self._given)
        return self._begin(trainer.steps({"train": train, "valid": valid, "test": test}))

    def backward(self, losses: Tensor, retain_graph: bool = False) -> None:
        """Add this rank's part of the gradient of the mean over the global batch. ``losses``: one for each sample of
        the micro-batch that is being read, or of all of this rank's where none is; (n,) or (n, …), of whose further
        dimensions the mean counts; or their mean (). The sums over all calls are the ``loss`` of reports."""
        self.step.backward(losses, retain_graph)

    def clip_gradients(
        self, optimizer: WrappedOptimizer, max_norm: float | None = None, clip_value: float | None = None
    ) -> float:
        """Sum the gradients of an optimizer over ranks, clip them by their norm or each element, and return the norm
        that they had."""
        return self.step.clip_gradients(self._part_of(optimizer), max_norm, clip_value)

    def gather(self, rows: Tensor | Sequence[Tensor]) -> Tensor:
        """Return rows of the global batch from those of this rank: the same on all ranks, in the order of samples at
        any number of ranks. ``rows``: one tensor (n, …) for each micro-batch, or one of all. Gradients flow back to the
        ranks, summed: let each rank's loss be that of its own rows against all, and the mean is that of the whole."""
        return self.step.gather(rows)

    def own_rows(self) -> Tensor:
        """Return the places of this rank's samples among those that `gather` returns, (n,) int64."""
        return self.step.own_rows()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of ``training.precision``, for forward passes."""
        kind = AUTOCAST[self.step.config.precision]
        return nullcontext() if kind is None else torch.autocast(self.step.device.type, dtype=kind)

    def log(self, name: str, value: float | Tensor) -> None:
        """Report a figure of rank 0's, see `trainer.Run.log`."""
        self.run.log(name, value)

    def stop(self) -> None:
        """Have the training end well after this batch, on all ranks, whichever of them call it. To be called before
        the batch is committed."""
        self.step.stop()

    @property
    def step(self) -> LoopStep:
        """The present step. Raise `ConfigError` outside of a block."""
        if self._step is None:
            raise ConfigError("this belongs into the block `with batch:` of loop.batches(…)")
        return self._step

    @property
    def run(self) -> Run:
        """The training as callbacks see it: rank, world size, steps. Raise `ConfigError` before `batches`."""
        if self._run is None:
            raise ConfigError("the training begins with loop.batches(…)")
        return self._run

    @property
    def device(self) -> torch.device:
        """The device of modules and micro-batches. Raise `ConfigError` before `batches`."""
        return self.run.device

    def on_start(self, run: Run) -> None:
        """Called by the training when it begins."""
        self._run = run

    def _set_up(self, part: Any) -> Any:
        if isinstance(part, nn.Module):
            kind = type(part).__name__.lower()
            names = (kind if number == 1 else f"{kind}{number}" for number in range(1, len(self._modules) + 2))
            self._modules[next(name for name in names if name not in self._modules)] = part
            return part
        if isinstance(part, Optimizer):
            if part.state:
                raise ConfigError(f"the optimizer {type(part).__name__} has a state already: give one that is new")
            wrapped = WrappedOptimizer(self, part)
            self._optimizers.append(wrapped)
            self._schedulers.append(None)
            return wrapped
        raise ConfigError(
            f"loop.setup was given a {type(part).__name__}: give modules, optimizers and schedulers of torch; what "
            "else has a state belongs into loop.register(name=…)"
        )

    def _set_up_scheduler(self, part: Any) -> Any:
        for place, wrapped in enumerate(self._optimizers):
            if part.optimizer is wrapped.optimizer:
                if self._schedulers[place] is not None:
                    raise ConfigError("an optimizer has two schedulers: chain them by torch's ChainedScheduler")
                self._schedulers[place] = part
                return part
        raise ConfigError(f"{type(part).__name__} belongs to an optimizer that was not given to loop.setup")

    def _parts(self) -> tuple[nn.Module, LoopParts]:
        """Return the modules as one, and what trains them. Raise `ConfigError` where they cannot be trained so."""
        if not self._modules or not self._optimizers:
            raise ConfigError("call loop.setup(model, optimizer) before loop.batches")
        module = next(iter(self._modules.values())) if len(self._modules) == 1 else nn.ModuleDict(self._modules)
        known = {id(each) for each in module.parameters()}
        seen = set[int]()
        for wrapped in self._optimizers:
            own = {id(each) for group in wrapped.optimizer.param_groups for each in group["params"]}
            if not own <= known:
                raise ConfigError("an optimizer has parameters of no module that was given to loop.setup: give it, too")
            if own & seen:
                raise ConfigError("two optimizers have the same parameters: give each its own")
            seen |= own
        return module, LoopParts(
            optimizers=[wrapped.optimizer for wrapped in self._optimizers],
            schedulers=self._schedulers,
            registered=self._registered,
            steps_several=self._several_steps or len(self._optimizers) > 1,
        )

    def _part_of(self, optimizer: WrappedOptimizer) -> LoopOptimizer:
        if optimizer not in self._optimizers:
            raise ConfigError("give the optimizer that loop.setup has returned")
        return self.step.optimizers[self._optimizers.index(optimizer)]

    def _begin(self, steps: Steps[Any]) -> Iterator[LoopBatch]:
        """Begin a training, and yield its batches."""
        self._steps = steps
        self._go_on(None)
        return self._each_batch()

    def _each_batch(self) -> Iterator[LoopBatch]:
        try:
            while self._due is not None:
                batch = LoopBatch(self, self._due)
                yield batch
                if not batch.was_entered:
                    raise ConfigError("what trains on a batch belongs into a block: `with batch:`")
            if self.result is None:  # the caller has caught what ended it
                raise LoopLeftError(
                    f"the training has failed and cannot go on: {type(self._failed).__name__}: {self._failed}. What a "
                    "block raises ends it; to leave out a sample, do so in the block, on all ranks alike"
                ) from self._failed
        except GeneratorExit:
            self._give_up(LoopLeftError("the loop was left before its end: loop.stop() ends a training well"))
            raise
        except ConfigError as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """End the training where the loop was left before its end."""
        steps, self._due, self._failed = self._steps, None, error
        if steps is not None and self.result is None:
            try:
                steps.throw(error)
            except BaseException as ended:  # what `fit` would raise: the caller's own reason comes first
                if isinstance(ended, KeyboardInterrupt):
                    raise
            steps.close()

    def _enter(self, batch: LoopBatch, due: DueStep) -> None:
        if due is not self._due:
            raise ConfigError("this batch is over: take the next one of loop.batches(…)")
        batch.was_entered = True
        self._step = cast(LoopStep, due.step)
        try:
            self._step.begin(due.batch, due.number, due.flags)
        except ConfigError as error:
            self._give_up(error)
            raise

    def _leave(self, batch: LoopBatch, error: BaseException | None) -> bool:
        """End a block, and return whether what it raised was a matter of the training, which goes on."""
        step, self._step = self.step, None
        failed = error
        if error is None:
            try:
                result = step.complete()
            except BaseException as raised:
                failed = raised
        if failed is None:
            batch.committed = True
            self._go_on(lambda steps: steps.send(result))
            step.note_versions()
            return True
        thrown = step.discard(failed)
        try:
            self._go_on(lambda steps: steps.throw(thrown))
        except BaseException as ended:
            self._failed = thrown
            if not isinstance(ended, Exception):
                raise
            if thrown is error and not isinstance(error, GroupError | NonFiniteError) and not is_out_of_memory(error):
                return False  # the caller's own, which says more
            raise ended from thrown
        step.note_versions()
        return True

    def _go_on(self, move: Callable[[Steps[FitResult]], DueStep] | None) -> None:
        """Have the training do what is due between two steps, and remember the next one."""
        assert self._steps is not None
        self._due = None
        try:
            self._due = next(self._steps) if move is None else move(self._steps)
        except StopIteration as end:
            self.result = end.value
