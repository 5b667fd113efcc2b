"""The training of a `trainer.loop.Loop` from a script: its settings, what it is tried with, and its problem.

What has to do with the caller's code is `trainer.loop`; with the step, `trainer.engine.loop_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainer.config import ConfigError, DistributedTrainingConfig, JobConfig
from trainer.data.loader import TrainingData
from trainer.engine.callbacks import check_callbacks, name_stateful
from trainer.engine.given_problem import GivenProblem
from trainer.engine.loop_step import LoopParts, LoopStep
from trainer.engine.module_state import refuse_extra_state
from trainer.engine.problem import Problem
from trainer.engine.task_check import try_scores
from trainer.fit import Trainer

Score = Callable[[Any], Tensor | Mapping[str, Tensor]]
"""Returns the loss of each sample of a micro-batch, (n,), or ``loss`` and further figures, each (n,), by name."""
_WITHOUT_EFFECT = (
    "learning_rate", "lr_scaling", "lr_base_batch_size", "warmup_steps", "schedule", "min_lr_fraction",
    "weight_decay", "decay_norms_and_biases",
    "clip_norm", "clip_value", "compile", "activation_checkpointing",
)  # fmt: skip
"""Settings of what a loop of its own does itself."""


class ScoreTask:
    """The task of a loop that evaluates: what ``score`` gives for a micro-batch."""

    def __init__(self, score: Score | None) -> None:
        self.score = score
        self._known: tuple[Any, Mapping[str, Tensor]] | None = None

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """Return the losses (n,)."""
        return self._figures(batch)["loss"]

    def metrics(self, model: Callable[..., Any], batch: Any) -> dict[str, Tensor]:
        """Return the other figures (n,) by name."""
        found = {name: values for name, values in self._figures(batch).items() if name != "loss"}
        self._known = None
        return found

    def _figures(self, batch: Any) -> Mapping[str, Tensor]:
        if self.score is None:
            raise ConfigError("loop.batches(…, score=…) says how a micro-batch is evaluated")
        if self._known is None or self._known[0] is not batch:
            given = self.score(batch)
            if isinstance(given, Tensor):
                given = {"loss": given}
            if not isinstance(given, Mapping) or "loss" not in given:
                raise ConfigError("score returned no loss: return one for each sample, or {'loss': …, …} by name")
            self._known = batch, given
        return self._known[1]


class LoopTrainer(Trainer):
    """A script's training whose steps a loop makes."""

    def __init__(self, module: nn.Module, parts: LoopParts, score: Score | None, **given: Any) -> None:
        """``given``: further arguments of `Trainer`."""
        super().__init__(module, task=ScoreTask(score), **given)
        self._parts, self._score = parts, score

    def try_problem(
        self, given: Mapping[str, Dataset[Any] | DataLoader[Any] | None]
    ) -> tuple[DistributedTrainingConfig, GivenProblem]:
        """Return the settings and what is trained. Raise `ConfigError` for what cannot be used."""
        request, data = self._read_given(given)
        if data.substreams:
            raise ConfigError("a Loop takes no Stream: Trainer.fit does; here give a map-style dataset")
        config = self._config_for(request, data)
        _refuse_settings(config)
        if self._score is None and (data.count("valid") or data.count("test")):
            raise ConfigError("loop.batches(train, valid) needs score=…, which evaluates a micro-batch of it")
        refuse_extra_state(self.model, config.strategy)
        check_callbacks(self._callbacks, config)
        if same := sorted(name_stateful(self._callbacks).keys() & self._parts.registered.keys()):
            raise ConfigError(f"loop.register({same[0]}=…): a callback has this name, give another")
        assert self._task is not None
        try_scores(self.model, self._task, data, config)
        return config, _LoopProblem(self.model, data, self._task, callbacks=self._callbacks, parts=self._parts)


@dataclass(frozen=True, slots=True)
class _LoopProblem(GivenProblem):
    """Makes the problem of a loop."""

    parts: LoopParts | None = None

    def make(self, job: JobConfig, data: TrainingData, device: torch.device) -> Problem:
        assert self.parts is not None
        parts = self.parts
        for optimizer in parts.optimizers:
            optimizer.state.clear()  # of a device that was left
        made = GivenProblem.make(self, job, data, device)
        return replace(made, attached=parts.registered, make_step=lambda *given: LoopStep(*given, parts=parts))


def _refuse_settings(config: DistributedTrainingConfig) -> None:
    """Raise `ConfigError` for settings that a loop of its own does not have."""
    if config.strategy != "ddp":
        raise ConfigError(f"training.strategy = {config.strategy!r} is for Trainer.fit: a Loop has 'ddp'")
    if config.precision == "fp16":
        raise ConfigError(
            "training.precision = 'fp16' needs a scaled loss, as Trainer.fit has it: use 'bf16' or 'fp32'"
        )
    if config.cuda_graphs == "on":
        raise ConfigError("training.cuda_graphs = 'on' records the step of Trainer.fit: leave it out in a Loop")
    usual = DistributedTrainingConfig()
    for name in _WITHOUT_EFFECT:
        if getattr(config, name) != getattr(usual, name):
            raise ConfigError(
                f"training.{name} has no effect in a Loop, whose optimizers, schedules, clipping and compilation are "
                "the script's: leave it out"
            )
