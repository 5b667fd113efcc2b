"""A rank that trains a job by a `trainer.Loop` instead of the step of `Trainer.fit`: to the same weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import AdamW

import trainer.__main__
import trainer.engine.run_job
from trainer.config import JobConfig
from trainer.engine.loop_step import LoopParts, LoopStep
from trainer.engine.problem import maker_of
from trainer.engine.run_job import train_job
from trainer.loop import Loop, WrappedOptimizer
from trainer.model.optimizers import split_by_decay

IS_LOOP = "HARNESS_LOOP"
"""Variable of a rank that trains by a loop; a rank without it trains as usual."""
OPTIMIZERS = 2
"""Among how many optimizers a rank divides the parameters."""


class _Maker:
    """Makes the problem of a job, whose steps are those of a loop."""

    def __init__(self, job: JobConfig, loop: Loop) -> None:
        self.loop = loop
        self._maker = maker_of(job)
        self.open_data = self._maker.open_data

    def make(self, job: JobConfig, data: Any, device: torch.device) -> Any:
        made = self._maker.make(job, data, device)
        self.problem, parameters = made, list(made.module.parameters())
        optimizers = [
            AdamW(split_by_decay(parameters[number::OPTIMIZERS], job.training), fused=True)
            for number in range(OPTIMIZERS)
        ]
        self.loop._optimizers = [WrappedOptimizer(self.loop, each) for each in optimizers]
        parts = LoopParts(optimizers=optimizers, schedulers=[None] * OPTIMIZERS, steps_several=True)
        return replace(made, make_step=lambda *given: LoopStep(*given, parts=parts))


def train_by_loop(job: JobConfig) -> int:
    """Train a job by a loop, with AdamW, schedule and clipping of its settings, and return the exit code."""
    loop = Loop()
    maker = _Maker(job, loop)
    ended: Any = None
    try:
        for batch in loop._begin(train_job(job, maker)):
            with batch:
                problem = maker.problem
                problem.module.train()
                for part in batch:
                    loop.backward(problem.task.loss(problem.module, part))
                _step(loop, loop._optimizers, batch._due.learning_rate, job.training.clip_norm)
    finally:
        ended = loop.result
    return int(ended[0])


def _step(loop: Loop, optimizers: Sequence[WrappedOptimizer], rate: float, limit: float | None) -> None:
    """Clip by the norm of all gradients, and take a step with each optimizer."""
    norms = [loop.clip_gradients(each) for each in optimizers]
    whole = math.hypot(*norms)
    for optimizer, norm in zip(optimizers, norms, strict=True):
        if limit is not None and whole > limit and norm:
            loop.clip_gradients(optimizer, max_norm=limit * norm / whole)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


def run(arguments: Sequence[str]) -> int:
    """Do what ``python -m trainer`` does, by a loop."""
    trainer.engine.run_job.run_job = train_by_loop
    return trainer.__main__.run(arguments)
