"""The interface of a judge, which validates a model while it trains and reports on it at the end, and the judge of any
task."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.config import ConfigError
from trainer.data.loader import TrainingData
from trainer.documents.schemas import FinishStage
from trainer.evaluation.evaluate import Evaluation, JudgeRequest, Scores
from trainer.evaluation.gate import judge_by_measure
from trainer.evaluation.measures import RESERVED, KeptOutputs, measure_by_chance, measure_together
from trainer.model.task import RememberedModel, SupervisedTask, Task, mean_of, measures_of, per_sample, weigher
from trainer.rundir import EVALUATION, RunDir


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
class TaskJudge:
    """Judges any task by the means of its loss and its metrics over a split, each sample once."""

    task: Task
    data: TrainingData
    monitor: str = "loss"
    """The figure that chooses the weights."""
    mode: str = "min"
    """Whether it is best when it is small, or ``max``."""

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
            by_chance = list[float]()
            found = evaluate_task(self.task, self.data, split, request, self.monitor, by_chance)
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
            if by_chance and all(map(math.isfinite, (found.figure(self.monitor), *by_chance))):
                report["chance"] = self._chance(found, split, by_chance)
                verdict = judge_by_measure(report)
                report["gate"] = {"passed": verdict.passed, "reasons": [*verdict.reasons]}
        begin("report")
        if request.world.rank == 0:
            run_dir.write_json(EVALUATION, report)
        return report

    def _chance(self, found: Evaluation, split: str, by_chance: Sequence[float]) -> dict[str, Any]:
        """Return what the gate needs to judge the model by a measure (`trainer.evaluation.gate.judge_by_measure`)."""
        return {
            "figure": self.monitor,
            "mode": self.mode,
            "value": found.figure(self.monitor),
            "shuffled": statistics.fmean(by_chance),
            "deviation": statistics.stdev(by_chance),
            "samples": self.data.name_split(split),
        }


def evaluate_task(
    task: Task,
    data: TrainingData,
    split: str,
    request: JudgeRequest,
    monitor: str = "",
    by_chance: list[float] | None = None,
) -> Evaluation:
    """Return the means of loss and metrics over a split, and its measures; a collective. ``by_chance`` gets what
    `measure_by_chance` gives for the figure ``monitor``, where a measure has it."""
    scorer = TaskScorer(task, request.model, KeptOutputs() if measures_of(task) else None)
    found = request.score(scorer.score, data, split)
    totals = {name: values.item() for name, values in found.sums.items()}
    total, weight = totals.pop("loss"), totals.pop(_WEIGHT)
    metrics = {name: value / found.samples for name, value in totals.items()}
    if scorer.kept is not None:
        measured = measure_together(measures_of(task), scorer.kept, request.world)
        metrics |= measured
        if by_chance is not None and monitor in measured:
            by_chance += measure_by_chance(measures_of(task), monitor, scorer.kept, request.world)
    if not weight:
        why = "none of its samples count: all are ignored (ignore_index), or weigh 0"
        return replace(found, why=why, has_odd_sample=True).evaluation(math.nan, metrics)
    return found.evaluation(mean_of(total, weight), metrics)


def measured_by(task: Task) -> Callable[..., tuple[Any, ...]]:
    """Return what gives the arguments of a task's measures. Raise `ConfigError` where the task has no such method."""
    found = getattr(task, "measured", None)
    if not callable(found):
        raise ConfigError(
            f"{type(task).__name__} has measures and no method measured(model, batch), which returns the arguments of "
            "their updates, such as (outputs, target)"
        )
    return found


_WEIGHT = ""
"""The name under which the weights of samples are summed, which no metric has."""


class TaskScorer:
    """Figures of a task on batches, without gradients; with them where the loss itself takes derivatives."""

    def __init__(self, task: Task, model: nn.Module, kept: KeptOutputs | None = None) -> None:
        """``kept``: where outputs are kept for the task's measures; None: they are not."""
        self.task, self.model, self.kept = task, model, kept
        self._takes_derivatives = False

    def score(self, batch: Any, count: int) -> Scores:
        """Return the sums of `figures`, and the losses."""
        model = self._remembered()
        if self.kept is not None:
            with torch.no_grad():
                self.kept.add(measured_by(self.task)(model, batch))
        figures = self.figures(batch, count, model)
        return {name: values.sum().item() for name, values in figures.items()}, {"loss": figures["loss"].cpu().numpy()}

    def figures(self, batch: Any, count: int, model: Any = None) -> dict[str, Tensor]:
        """Return losses and metrics of a batch, and what its samples weigh, each (count,) in float64. ``model``: one
        that remembers its outputs. Raise `ConfigError` where there is not one real number for each sample."""
        if not self._takes_derivatives:
            try:
                with torch.no_grad():
                    return self._figures(batch, count, model or self._remembered())
            except RuntimeError as error:
                if _NO_DERIVATIVES not in str(error):
                    raise
                self._takes_derivatives = True
        with torch.enable_grad():
            return {name: values.detach() for name, values in self._figures(batch, count, self.model).items()}

    def _remembered(self) -> Any:
        """Return the model, which remembers its outputs where the task uses nothing else of it."""
        return RememberedModel(self.model) if type(self.task) is SupervisedTask else self.model

    def _figures(self, batch: Any, count: int, model: Any) -> dict[str, Tensor]:
        weigh = weigher(self.task)
        losses = per_sample(self.task.loss(model, batch), count, "the loss", summed=weigh is not None)
        weights = torch.ones(count) if weigh is None else per_sample(weigh(batch), count, "weights", summed=True)
        found: dict[str, Tensor] = {"loss": losses, _WEIGHT: weights}
        metrics: Callable[..., Mapping[str, Tensor]] | None = getattr(self.task, "metrics", None)
        for name, values in (metrics(model, batch) if metrics is not None else {}).items():
            if name in RESERVED:
                raise ConfigError(f"a metric is named {name!r}, which every report already uses: give it another name")
            found[name] = per_sample(values, count, f"the metric {name!r}")
        return {name: values.double() for name, values in found.items()}


_NO_DERIVATIVES = "does not require grad"
"""What torch says where derivatives are taken without a graph."""
