"""Judges: how a model is validated while it trains, and how it is reported on at the end, by the kind of its data.

The interface and the judge of any task belong here; the judge of windows of prices uses `trainer.evaluation.evaluate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.config import ConfigError
from trainer.data.batches import find_odd_row
from trainer.data.loader import TrainingData
from trainer.documents.schemas import FinishStage
from trainer.evaluation.evaluate import Evaluation, evaluate, final_report
from trainer.evaluation.shared_work import SharedWork
from trainer.model.task import Task, mean_of, per_sample, weigher
from trainer.rundir import EVALUATION, RunDir

if TYPE_CHECKING:
    from trainer.comm.world import World
    from trainer.data.shards import DataShardManager


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeRequest:
    """What a judgement needs of the training that asks for it."""

    model: nn.Module
    world: World
    device: torch.device
    batch_size: int
    before_batch: Callable[[], object] = lambda: None
    """Called before each batch; it may raise, to end the judgement."""


class Judge(Protocol):
    """The interface of a judge. All ranks call its methods together."""

    def validate(self, request: JudgeRequest) -> Evaluation | None:
        """Return the judgement of the model on the validation split; None where there is none."""
        ...

    def report(self, request: JudgeRequest, run_dir: RunDir, begin: Callable[[FinishStage], object]) -> dict[str, Any]:
        """Return the final report, in whose ``model`` the figures on the test split are. Rank 0 writes it as
        ``evaluation.json``. ``begin`` is called with each stage, as it begins. Raise ValueError where the loss is not
        finite, before anything is written."""
        ...


@dataclass(frozen=True, slots=True)
class WindowJudge:
    """Judges forecasts of windows: proper scores, against baselines of volatility."""

    criterion: nn.Module
    shards: DataShardManager
    make_criterion: Callable[[Mapping[str, float]], nn.Module]
    """Returns the loss with these arguments besides its own."""

    def validate(self, request: JudgeRequest) -> Evaluation:
        """Return the judgement on the validation split."""
        return evaluate(
            request.model, self.criterion, self.shards, "valid", request.world, request.batch_size, request.device,
            before_batch=request.before_batch,
        )  # fmt: skip

    def report(self, request: JudgeRequest, run_dir: RunDir, begin: Callable[[FinishStage], object]) -> dict[str, Any]:
        """Return the report on the test split, with its baselines. ``correction`` in it are the arguments of the loss
        by which its distributions were corrected on the validation split, before they were judged."""
        arguments = self._calibrate(request)
        criterion = self.make_criterion(arguments) if arguments else self.criterion
        report = final_report(
            request.model, criterion, self.shards, request.world, request.device, run_dir, request.batch_size,
            begin=begin,
        )  # fmt: skip
        return {**report, "correction": arguments}

    def _calibrate(self, request: JudgeRequest) -> dict[str, float]:
        """Return the arguments that correct the loss; none of a loss that does not calibrate. A collective."""
        calibrate: Callable[..., dict[str, float]] | None = getattr(self.criterion, "calibrate", None)
        if calibrate is None:
            return {}
        found = evaluate(
            request.model, self.criterion, self.shards, "valid", request.world, request.batch_size, request.device,
            collect=True,
        ).predictions  # fmt: skip
        names: tuple[str, ...] = getattr(self.criterion, "corrections", ())
        numbers = {} if found is None else calibrate(found.predictive, torch.from_numpy(found.target))
        arguments = {name: float(numbers[name]) for name in names if name in numbers}
        return request.world.all_gather_object(arguments)[0]


@dataclass(frozen=True, slots=True)
class TaskJudge:
    """Judges any task by the means of its loss and its metrics over a split, each sample once."""

    task: Task
    data: TrainingData

    def validate(self, request: JudgeRequest) -> Evaluation | None:
        """Return the judgement on the validation split; None where it is empty."""
        return evaluate_task(self.task, self.data, "valid", request) if self.data.count("valid") else None

    def report(self, request: JudgeRequest, run_dir: RunDir, begin: Callable[[FinishStage], object]) -> dict[str, Any]:
        """Return the means on the test split, or where there is none on the validation split, which then has served to
        choose the weights, too. Without both, the report has no figures."""
        begin("test split")
        split = next((name for name in ("test", "valid") if self.data.count(name)), None)
        report: dict[str, Any] = {"model": {}, "baselines": {}, "notes": ["there is no test or validation split"]}
        if split is not None:
            found = evaluate_task(self.task, self.data, split, request)
            if not math.isfinite(found.loss):
                raise ValueError(f"the loss on the {split} split is {found.loss}: {found.why}")
            chosen = ["the weights were chosen on this very split: there is no test split"]
            odd = sorted(name for name, value in found.metrics.items() if not math.isfinite(value))
            notes = [f"not a finite number on the {split} split: {', '.join(odd)}"] if odd else []
            report = {
                "model": {
                    "loss": found.loss,
                    "samples": found.samples,
                    **{name: None if name in odd else value for name, value in found.metrics.items()},
                },
                "baselines": {},
                "split": split,
                "notes": [*(chosen if split == "valid" else []), *notes],
            }
        begin("report")
        if request.world.rank == 0:
            run_dir.write_json(EVALUATION, report)
        return report


def evaluate_task(task: Task, data: TrainingData, split: str, request: JudgeRequest) -> Evaluation:
    """Return the means of loss and metrics over a split; a collective. Ranks take whole batches, the same at any world
    size, and sums are taken in float64: the result does not depend on how many ranks there are."""
    count = data.count(split)
    first, last = SharedWork(request.world).part(count, request.batch_size)
    was_training = request.model.training
    request.model.eval()
    sums: dict[str, float] = {"loss": 0.0, _WEIGHT: 0.0}
    odd: tuple[int, bool, str] | None = None
    judging = Judging(task, request.model)
    parts = [
        np.arange(start, min(start + request.batch_size, last)) for start in range(first, last, request.batch_size)
    ]
    for positions, batch in zip(parts, data.read_each(split, parts, request.device), strict=True):
        request.before_batch()
        for name, values in judging.figures(batch, len(positions)).items():
            sums[name] = sums.get(name, 0.0) + values.sum().item()
            if odd is None and name == "loss" and not math.isfinite(sums[name]):
                odd = describe_odd(batch, values, positions)
    request.model.train(was_training)
    # A rank without samples knows no names: all use those of the first that has some.
    names = max(request.world.all_gather_object(sorted(sums)), key=len)
    summed = request.world.all_reduce(torch.tensor([sums.get(name, 0.0) for name in names], dtype=torch.float64))
    totals = dict(zip(names, summed.tolist(), strict=True))
    total, weight = totals.pop("loss"), totals.pop(_WEIGHT)
    loss = mean_of(total, weight) if weight else math.nan
    means = {name: value / count for name, value in totals.items()}
    if math.isfinite(loss):
        return Evaluation(samples=count, loss=loss, metrics=means)
    if not weight:
        why = "none of its samples count: all are ignored (ignore_index), or weigh 0"
        return Evaluation(samples=count, loss=loss, metrics=means, why=why, has_odd_sample=True)
    told: list[Any] = [each for each in request.world.all_gather_object(odd) if each is not None]
    _, has_odd_sample, why = min(told, default=(0, False, "the sum of its losses is too large"))
    return Evaluation(samples=count, loss=loss, metrics=means, why=why, has_odd_sample=has_odd_sample)


RESERVED = ("loss", "samples")
"""Names of figures in reports that no metric may have."""
_WEIGHT = ""
"""The name under which the weights of samples are summed, which no metric has."""


class Judging:
    """Figures of a task on batches, without gradients; with them where the loss itself takes derivatives."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.task, self.model = task, model
        self._takes_derivatives = False

    def figures(self, batch: Any, count: int) -> dict[str, Tensor]:
        """Return losses and metrics of a batch, and what its samples weigh, each (count,) in float64. Raise
        `ConfigError` where there is not one real number for each sample."""
        if not self._takes_derivatives:
            try:
                with torch.no_grad():
                    return self._figures(batch, count)
            except RuntimeError as error:
                if _NO_DERIVATIVES not in str(error):
                    raise
                self._takes_derivatives = True
        with torch.enable_grad():
            return {name: values.detach() for name, values in self._figures(batch, count).items()}

    def _figures(self, batch: Any, count: int) -> dict[str, Tensor]:
        weigh = weigher(self.task)
        losses = per_sample(self.task.loss(self.model, batch), count, "the loss", summed=weigh is not None)
        weights = torch.ones(count) if weigh is None else per_sample(weigh(batch), count, "weights", summed=True)
        found: dict[str, Tensor] = {"loss": losses, _WEIGHT: weights}
        metrics: Callable[..., Mapping[str, Tensor]] | None = getattr(self.task, "metrics", None)
        for name, values in (metrics(self.model, batch) if metrics is not None else {}).items():
            if name in RESERVED:
                raise ConfigError(f"a metric is named {name!r}, which every report already uses: give it another name")
            found[name] = per_sample(values, count, f"the metric {name!r}")
        return {name: values.double() for name, values in found.items()}


_NO_DERIVATIVES = "does not require grad"
"""What torch says where derivatives are taken without a graph."""


def describe_odd(batch: Any, losses: Tensor, positions: NDArray[np.int64]) -> tuple[int, bool, str]:
    """Return the first position of a batch whose loss is not finite, whether that is for its data, and a sentence."""
    rows = (~torch.isfinite(losses)).nonzero()
    position = int(positions[int(rows[0][0]) if len(rows) else 0])
    found = find_odd_row(batch, losses)
    if found is None:
        return position, False, f"sample {position} is the first whose loss is not a number, though its data are finite"
    row, name, value = found
    position = int(positions[row])
    return position, True, f"sample {position} has {value} in {name}: fix that sample, or leave it out"
