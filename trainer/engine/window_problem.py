"""The problem of a job on windows of prices, and how its model is validated and reported on."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.config import JobConfig
from trainer.data.loader import TrainingData, fits_on_device
from trainer.data.manifest import SPLITS
from trainer.data.sampler import spread_positions
from trainer.data.shards import DatasetError, DataShardManager
from trainer.documents.schemas import FinishStage
from trainer.engine.problem import Problem
from trainer.evaluation.evaluate import EVAL_BATCH, Evaluation, JudgeRequest, Scores, SharedWork
from trainer.evaluation.window_report import PROPER_SCORES, Predictions, build_report, judge_baselines, score_forecast
from trainer.model.build import build_loss, build_model
from trainer.model.losses import Predictive, gives_predictive
from trainer.model.task import SupervisedTask
from trainer.rundir import EVALUATION, PREDICTIONS, RunDir

_COLUMNS = ("row", "target", "loss", "mu", "sigma", "nu")


class WindowProblemMaker:
    """Makes the problem of a job on windows of prices."""

    def open_data(self, job: JobConfig, device: torch.device) -> DataShardManager:
        """Return the dataset of the job, on the device where that is configured. Raise `DatasetError` where it cannot
        be used."""
        shards = DataShardManager(job.dataset.uri, expected_id=job.dataset.dataset_id)
        for split in SPLITS:
            if shards.count(split) == 0:
                raise DatasetError(f"{job.dataset.uri}: the {split} split has no samples; choose other split dates")
        is_wanted = job.training.data_on_device and device.type == "cuda"
        if is_wanted and fits_on_device(shards.sample_bytes, torch.cuda.mem_get_info(device)[0]):
            shards.keep_on(device)
        return shards

    def make(self, job: JobConfig, data: TrainingData, device: torch.device) -> Problem:
        """Return the problem on the windows. Raise `trainer.config.ConfigError` for a model or loss that cannot be
        used."""
        assert isinstance(data, DataShardManager)
        criterion = build_loss(job.loss, data.spec).to(device)
        second = getattr(criterion, "second_target", None)
        if second is not None:
            data.add_target(second)
        module = build_model(job.model, data.spec, int(criterion.outputs)).to(device)  # type: ignore[arg-type]
        model, loss = asdict(job.model), asdict(job.loss)

        def make_criterion(arguments: Mapping[str, float]) -> nn.Module:
            changed = replace(job.loss, args={**job.loss.args, **arguments})
            return build_loss(changed, data.spec).to(device)

        return Problem(
            data=data,
            task=SupervisedTask(criterion),
            module=module,
            judge=WindowJudge(criterion, data, make_criterion),
            identity=(data.spec.dataset_id, model, loss),
            description={"model": model, "loss": loss, "spec": asdict(data.spec)},
            evaluation_batch=EVAL_BATCH,
        )


@dataclass(frozen=True, slots=True)
class WindowJudge:
    """Judges forecasts of windows: proper scores, against baselines of volatility."""

    criterion: nn.Module
    shards: DataShardManager
    make_criterion: Callable[[Mapping[str, float]], nn.Module]
    """Returns the loss with these arguments besides its own."""

    def validate(self, request: JudgeRequest) -> Evaluation:
        """Return the judgement on the validation split."""
        found = request.score(WindowScorer(request.model, self.criterion), self.shards, "valid")
        means = {name: values.item() / found.samples for name, values in found.sums.items()}
        loss, zero, squared = (means.pop(name) for name in ("loss", "zero_squared_error", "squared_error"))
        means |= {"mse_to_zero": squared / zero} if zero > 0 else {}
        return found.evaluation(loss, {name: value for name, value in means.items() if not math.isnan(value)})

    def report(self, request: JudgeRequest, run_dir: RunDir, begin: Callable[[FinishStage], object]) -> dict[str, Any]:
        """Return the report on the test split against the baselines, which ranks judge together. ``correction`` in it
        are the arguments of the loss by which its distributions were corrected on the validation split, before they
        were judged.

        Rank 0 writes ``predictions.npz`` (row, date, ticker's code, target, loss, mu, sigma, nu; ``tickers`` holds the
        names by code) and ``evaluation.json``."""
        shards, world = self.shards, request.world
        arguments = self._calibrate(request)
        criterion = self.make_criterion(arguments) if arguments else self.criterion
        begin("test split")
        loss, predictions = forecast_windows(criterion, shards, "test", request)
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss on the test split is {loss}: the model's outputs have overflowed; "
                "lower training.learning_rate or training.clip_norm"
            )
        begin("baselines")
        scores = judge_baselines(shards, "test", SharedWork(world))
        begin("report")
        report: dict[str, Any] = {}
        if world.rank == 0:
            days = shards.dates(predictions.row).astype("datetime64[D]")
            report = build_report(predictions, days, scores, shards.spec.horizon)
            buffer = io.BytesIO()
            np.savez_compressed(
                buffer,
                date=days,
                ticker=shards.tickers(predictions.row).astype(np.int32),
                tickers=np.array(shards.tickers_by_code),
                **{name: getattr(predictions, name) for name in _COLUMNS},
            )
            run_dir.storage.write(PREDICTIONS, buffer.getvalue())
            run_dir.write_json(EVALUATION, report)
        world.barrier()  # rank 0 takes the longer to write, the more data there is
        return {**world.all_gather_object(report)[0], "correction": arguments}

    def _calibrate(self, request: JudgeRequest) -> dict[str, float]:
        """Return the arguments that correct the loss; none of a loss that does not calibrate. A collective."""
        calibrate: Callable[..., dict[str, float]] | None = getattr(self.criterion, "calibrate", None)
        if calibrate is None:
            return {}
        _, found = forecast_windows(self.criterion, self.shards, "valid", request)
        names: tuple[str, ...] = getattr(self.criterion, "corrections", ())
        numbers = calibrate(found.predictive, torch.from_numpy(found.target)) if request.world.rank == 0 else {}
        arguments = {name: float(numbers[name]) for name in names if name in numbers}
        return request.world.all_gather_object(arguments)[0]


def forecast_windows(
    criterion: nn.Module, shards: DataShardManager, split: str, request: JudgeRequest
) -> tuple[float, Predictions]:
    """Return the mean loss over a split, and single forecasts, of a large split a part. A collective."""
    found = request.score(WindowScorer(request.model, criterion), shards, split, keeps=True)
    rows = shards.end_rows(split, spread_positions(found.samples))
    return found.sums["loss"].item() / found.samples, Predictions(rows, **found.kept)


@dataclass(frozen=True, slots=True)
class WindowScorer:
    """Scores a model's forecasts of windows as far as its loss says what they mean."""

    model: nn.Module
    criterion: Any

    def __call__(self, batch: Any, count: int) -> Scores:
        """Return proper scores and squared errors, and single forecasts."""
        windows, target = batch
        with torch.no_grad():
            outputs = self.model(windows)
            losses = self.criterion(outputs, target)
            returns = target if target.dim() == 1 else target[:, 0]
            mu = sigma = nu = torch.full_like(returns, math.nan)
            if is_distribution := gives_predictive(self.criterion):
                predictive: Predictive = self.criterion.predictive(outputs)
                mu, sigma, nu = predictive.mu, predictive.sigma, predictive.nu
            elif callable(getattr(self.criterion, "point", None)):
                mu = self.criterion.point(outputs)
        columns = dict(zip(_COLUMNS[1:], (returns, losses, mu, sigma, nu), strict=True))
        each = {name: column.double().cpu().numpy() for name, column in columns.items()}
        forecast = Predictions(np.arange(0), **each)
        judged = score_forecast(forecast.predictive, forecast.target)
        sums = {name: judged[name].sum() if judged else math.nan for name in PROPER_SCORES if is_distribution}
        sums["loss"] = forecast.loss.sum()
        sums["squared_error"] = ((forecast.target - forecast.mu) ** 2).sum()
        sums["zero_squared_error"] = (forecast.target**2).sum()
        return sums, each
