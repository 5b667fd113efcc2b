"""The problem of a job on the rows of a table, and how its model is validated and reported on.

The baselines are judged in `trainer.evaluation.row_comparison`, and how forecasts are scored is
`trainer.evaluation.row_scores`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.config import JobConfig
from trainer.data.loader import TrainingData
from trainer.data.manifest import SPLITS, DatasetError
from trainer.data.row_data import RowData
from trainer.data.sampler import spread_positions
from trainer.documents.schemas import FinishStage
from trainer.engine.problem import Problem
from trainer.evaluation.evaluate import Evaluation, JudgeRequest, Scores, SharedWork, SplitScores
from trainer.evaluation.gate import gate_document
from trainer.evaluation.row_comparison import compare_rows
from trainer.evaluation.row_scores import RowScoring, calibration_table
from trainer.model.build import build_loss, build_model
from trainer.model.task import SupervisedTask
from trainer.rundir import EVALUATION, PREDICTIONS, RunDir
from trainer.spec import ROWS

ROWS_AT_ONCE = 4096
"""Rows that are evaluated at once, while memory suffices."""


class RowProblemMaker:
    """Makes the problem of a job on the rows of a table."""

    def open_data(self, job: JobConfig, device: torch.device) -> RowData:
        """Return the data of the job. Raise `DatasetError` where it cannot be used."""
        data = RowData(job.dataset.uri, expected_id=job.dataset.dataset_id)
        for split in SPLITS:
            if not data.count(split):
                raise DatasetError(
                    f"{job.dataset.uri}: the {split} split has no samples; build it with other fractions"
                )
        return data

    def make(self, job: JobConfig, data: TrainingData, device: torch.device) -> Problem:
        """Return the problem on the rows. Raise `trainer.config.ConfigError` for a model or loss that cannot be
        used."""
        assert isinstance(data, RowData)
        criterion = build_loss(job.loss, data.spec).to(device)
        module = build_model(job.model, data.spec, int(criterion.outputs)).to(device)  # type: ignore[arg-type]
        model, loss = asdict(job.model), asdict(job.loss)
        return Problem(
            data=data,
            task=SupervisedTask(criterion),
            module=module,
            judge=RowJudge(criterion, data),
            identity=(data.dataset_id, model, loss),
            description={"kind": ROWS, "model": model, "loss": loss, "spec": asdict(data.spec)},
            evaluation_batch=ROWS_AT_ONCE,
        )


@dataclass(frozen=True, slots=True)
class RowJudge:
    """Judges forecasts of classes by log-loss, accuracy and calibration, and forecasts of numbers by their errors,
    against the constant and a linear model."""

    criterion: nn.Module
    data: RowData

    def validate(self, request: JudgeRequest) -> Evaluation:
        """Return the judgement on the validation split, with the accuracy of a loss that knows probabilities, and the
        squared error, in the target's unit, of one that knows a forecast."""
        found = request.score(self._scorer(request.model), self.data, "valid")
        metrics = {}
        if "figures" in found.sums:
            name, place = ("squared_error", 1) if RowScoring(self.data.spec).is_number else ("accuracy", 2)
            metrics[name] = float(found.sums["figures"][place]) / found.samples
        return found.evaluation(found.sums["loss"].item() / found.samples, metrics)

    def report(self, request: JudgeRequest, run_dir: RunDir, begin: Callable[[FinishStage], object]) -> dict[str, Any]:
        """Return the report on the test split. Rank 0 writes it, and single forecasts as ``predictions.npz`` (row,
        target, loss, mu: the number or the code of the class; of a large split a part). Raise ValueError where the loss
        is not finite, before anything is written."""
        begin("test split")
        found = request.score(self._scorer(request.model), self.data, "test", keeps=True)
        loss = found.sums["loss"].item() / found.samples
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss on the test split is {loss}: lower training.learning_rate or training.clip_norm"
            )
        begin("baselines")
        work = SharedWork(request.world)
        compared = compare_rows(self.data, found.kept["score"], work, request.batch_size, request.before_batch)
        begin("report")
        report = self._document(loss, found, *compared)
        if request.world.rank == 0:
            buffer = io.BytesIO()
            rows = spread_positions(found.samples)
            nothing = np.full(len(rows), math.nan)  # that no distribution was forecast
            columns: dict[str, Any] = {name: found.kept[name] for name in ("target", "loss", "mu")}
            np.savez_compressed(buffer, row=rows, sigma=nothing, nu=nothing, **columns)
            run_dir.storage.write(PREDICTIONS, buffer.getvalue())
            run_dir.write_json(EVALUATION, report)
        request.world.barrier()  # rank 0 takes the longer to write, the more data there is
        return report

    def _document(
        self, loss: float, found: SplitScores, baselines: Mapping[str, Any], canary: Mapping[str, Any]
    ) -> dict[str, Any]:
        scoring, sums = RowScoring(self.data.spec), found.sums.get("figures")
        model: dict[str, Any] = {"loss": loss, "samples": found.samples}
        notes = []
        if sums is None:
            notes.append("the loss gives neither probabilities nor a forecast, so it is judged by its own value alone")
        else:
            model |= scoring.figures(sums)
            score = "rmse" if scoring.is_number else "log_loss"
            not_below = [name for name, figures in baselines.items() if not model[score] < figures[score]]
            if not_below:
                notes.append(f"{score} is not below that of {' and '.join(not_below)}: this model gains nothing")
        if not canary["passed"]:
            notes.append(
                "a linear model of shuffled targets is better than the constant beyond chance: the figures of this "
                "report cannot be trusted"
            )
        report: dict[str, Any] = {
            "kind": ROWS,
            "split": "test",
            "task": self.data.spec.task,
            "model": model,
            "baselines": baselines,
            "canaries": {"shuffled_targets": canary},
            "notes": notes,
        }
        if sums is not None and not scoring.is_number:
            report["calibration"] = calibration_table(sums)
        report["gate"] = gate_document(report)
        return report

    def _scorer(self, model: nn.Module) -> Callable[[Any, int], Scores]:
        """Return what scores a batch: the losses, and where the loss knows a forecast, its figures."""
        scoring = RowScoring(self.data.spec)
        forecast: Callable[[Any], Any] | None = getattr(
            self.criterion, "point" if scoring.is_number else "probabilities", None
        )

        def score(batch: Any, count: int) -> Scores:
            rows, target = batch
            with torch.no_grad():
                outputs = model(rows).float()
                losses = self.criterion(outputs, target).double().cpu().numpy()
                found = None if forecast is None else forecast(outputs).double().cpu().numpy()
            truth = target.cpu().numpy()
            sums, each = {"loss": losses.sum()}, {"target": truth.astype(np.float64), "loss": losses}
            if found is None:
                nothing = np.full(count, math.nan)
                return sums, {**each, "mu": nothing, "score": nothing}
            sums["figures"] = scoring.sums(found, truth)
            each["mu"] = found if scoring.is_number else found.argmax(axis=1).astype(np.float64)
            return sums, {**each, "score": scoring.score(found, truth)}

        return score
