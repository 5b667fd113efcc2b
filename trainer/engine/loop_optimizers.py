"""The optimizers of a loop of the caller's own: each with the sums of its gradients over ranks, and what takes its
steps back. The step that they belong to is `trainer.engine.loop_step`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler

from trainer.comm.world import World
from trainer.config import DistributedTrainingConfig
from trainer.engine.step import EPSILON
from trainer.model.optimizers import OptimizerRecipe, ScheduledOptimizer
from trainer.parallel.buckets import gradient_norm
from trainer.parallel.synchronizer import GradientSynchronizer
from trainer.runtime.fault_injection import Faults
from trainer.runtime.nested import map_leaves
from trainer.runtime.step_timer import StepTimer


class _Parameters(nn.Module):
    """The parameters of an optimizer, in the order of its groups."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self.held = nn.ParameterList(each for group in optimizer.param_groups for each in group["params"])


class LoopOptimizer:
    """One of the optimizers of a loop, with the sums of its gradients over ranks."""

    def __init__(self, optimizer: Optimizer, scheduler: Any, config: DistributedTrainingConfig) -> None:
        self.config, self.holder = config, _Parameters(optimizer)
        self.parameters = list(self.holder.held)
        recipe = OptimizerRecipe(lambda _: optimizer, None if scheduler is None else lambda _: scheduler)
        self.scheduled = ScheduledOptimizer(self.holder, recipe, config, 0)
        self.sync: GradientSynchronizer | None = None
        self._summed: list[bool] = []
        """Which parameters were trained when the group was formed."""
        self.norm = 0.0
        """The norm of the gradients, before clipping."""
        self.is_summed = False
        self._is_clipped = False
        self._options: list[dict[str, Any]] = []
        self._schedule: Any = None
        self._kept: tuple[list[Tensor], dict[int, Any]] | None = None

    @property
    def optimizer(self) -> Optimizer:
        return self.scheduled.optimizer

    @property
    def schedule_step(self) -> int | None:
        """How often its scheduler has moved on; None where it has none."""
        scheduler = self.scheduled.scheduler
        if scheduler is None:
            return None
        if isinstance(scheduler, ChainedScheduler):  # which counts nothing itself
            return sum(int(part["last_epoch"]) for part in scheduler.state_dict()["_schedulers"])
        return int(scheduler.last_epoch)

    def adopt(self, world: World, faults: Faults, timer: StepTimer) -> None:
        """Sum gradients over the ranks of a world from now on. A collective."""
        if self.sync is not None:
            self.sync.unwrap()
        config, step = replace(self.config, timing=False), self.sync.step if self.sync is not None else 0
        self.sync = GradientSynchronizer(world, faults, timer, config=config, at_end=True)
        self.sync.step = step
        self.sync.wrap(self.holder)
        self._summed = self._trained()

    def begin(self, step: int) -> None:
        """Prepare a step: without gradients, and what a schedule changes kept."""
        assert self.sync is not None
        self.sync.step = step
        self._options = [{**group, "params": None} for group in self.optimizer.param_groups]
        scheduler = self.scheduled.scheduler
        self._schedule = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
        self._kept = None
        self.clear()

    def clear(self) -> None:
        """Forget the gradients."""
        assert self.sync is not None
        self.sync.clear(self.parameters)
        for each in self.parameters:
            each.grad = None  # the sums leave out what was frozen when the group was formed
        self.is_summed, self._is_clipped, self.norm = False, False, 0.0

    def sum_gradients(self) -> None:
        """Let the gradients be the sums over ranks, once. A collective."""
        if self.is_summed:
            return
        assert self.sync is not None
        given = [each.grad if each.requires_grad else None for each in self.parameters]
        if self._trained() != self._summed:  # some were frozen or unfrozen
            self.adopt(self.sync.world, self.sync.faults, self.sync.timer)
        for each, gradient in zip(self.parameters, given, strict=True):  # which `adopt` has dropped
            each.grad = gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
        self.sync.require_sync(True)
        self.sync.finish(self.holder)
        self.norm = gradient_norm(self.gradients(), self.sync.world.device).item()
        self.is_summed = True

    def gradients(self) -> list[Tensor]:
        """Return the gradients that there are."""
        return [each.grad for each in self.parameters if each.grad is not None]

    def clip(self, max_norm: float | None, clip_value: float | None) -> float:
        """Clip the sums of gradients, and return the norm that they had."""
        norm = self.norm
        if self._is_clipped:  # once before, in this step
            norm = gradient_norm(self.gradients(), self.parameters[0].device).item()
        self._is_clipped = True
        if max_norm is not None and norm + EPSILON > max_norm:
            for gradient in self.gradients():
                gradient.mul_(max_norm / (norm + EPSILON))
        for gradient in self.gradients() if clip_value is not None else ():
            gradient.clamp_(-clip_value, clip_value)  # type: ignore[operator]
        return norm

    @property
    def is_kept(self) -> bool:
        """Whether its parameters can be put back as they were before this step."""
        return self._kept is not None

    def keep(self) -> None:
        """Keep what an update changes, unless that was done in this step."""
        if self._kept is None:
            self._kept = [each.detach().clone() for each in self.parameters], _copied(self.scheduled.tensors())

    def put_back(self) -> None:
        """Be as before the step."""
        if self._kept is not None:
            values, tensors = self._kept
            with torch.no_grad():
                for parameter, value in zip(self.parameters, values, strict=True):
                    parameter.copy_(value)
            self.scheduled.load(tensors, None)
        for group, options in zip(self.optimizer.param_groups, self._options, strict=True):
            group.update({name: value for name, value in options.items() if name != "params"})
        if self._schedule is not None:
            self.scheduled.scheduler.load_state_dict(self._schedule)
        self.clear()

    def _trained(self) -> list[bool]:
        return [each.requires_grad for each in self.parameters]


class LoopOptimizers:
    """All optimizers of a loop, as a training sees its one."""

    def __init__(self, parts: Sequence[LoopOptimizer]) -> None:
        self.parts = parts
        self.recipe = parts[0].scheduled.recipe

    @property
    def optimizer(self) -> Optimizer:
        """The first one."""
        return self.parts[0].optimizer

    @property
    def rate(self) -> float:
        """The learning rate of the first group of the first one."""
        return float(self.optimizer.param_groups[0].get("lr", 0.0))

    @property
    def digest(self) -> str:
        return "-".join(part.scheduled.digest for part in self.parts)

    def note_evaluation(self, score: float) -> None:
        """The caller moves schedules on."""

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of each, whose tensors are the live ones."""
        return [{"state": each.scheduled.tensors(), **each.scheduled.options()} for each in self.parts]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over what `state_dict` has returned."""
        for part, state in zip(self.parts, states, strict=True):
            part.scheduled.load(state["state"], state)

    def explain_misfit(self, states: Any) -> str:
        """Return why these states cannot be taken over, "" where they can."""
        if not isinstance(states, list):
            return "it was trained with Trainer.fit, and this is a loop of its own: train under another name"
        if len(states) != len(self.parts):
            return f"it was trained with {len(states)} optimizers, and there are {len(self.parts)} now"
        whys = (part.scheduled.explain_misfit(state) for part, state in zip(self.parts, states, strict=True))
        return next(filter(None, whys), "")


def _copied(state: dict[int, Any]) -> dict[int, Any]:
    """Return a copy of tensors in dictionaries."""
    return {
        place: map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else copy.copy(leaf), held)
        for place, held in state.items()
    }
