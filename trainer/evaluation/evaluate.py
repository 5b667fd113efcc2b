"""The evaluation of a model: a distributed pass over one split, and the report on the test split with its baselines.

Every sample counts exactly once: rank r takes a contiguous part of the positions, nothing is padded or repeated, and
sums are reduced in float64, so the result does not depend on the world size. Memory does not grow with the split: sums
are taken chunk by chunk, and of a split with more than `MOST_JUDGED` windows that many are kept, at even distances.

Where single forecasts are kept, ranks take whole batches, the same at any world size: with equally many threads and on
the same kind of processor, a forecast is then the same bit for bit, however many ranks there are.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.data.sampler import spread_positions
from trainer.documents.schemas import FinishStage
from trainer.evaluation.report import Predictions, build_report, judge_baselines, score_forecast
from trainer.evaluation.shared_work import SharedWork
from trainer.model.losses import Predictive, gives_predictive
from trainer.rundir import EVALUATION, PREDICTIONS, RunDir

if TYPE_CHECKING:
    from trainer.comm.world import World
    from trainer.data.shards import DataShardManager

EVAL_BATCH = 1024
CHUNK = 1 << 16
"""Samples whose sums are taken at once."""
_FIELDS = 6  # row, target, loss, mu, sigma, nu


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``loss`` is the mean per sample and ``metrics`` what could be judged beside it, equal on all ranks;
    ``predictions`` are on rank 0 only, and only where asked for; of a large split a part
    (`trainer.data.sampler.spread_positions`)."""

    samples: int
    loss: float
    metrics: dict[str, float]
    predictions: Predictions | None = None
    why: str = ""
    """Why the loss is no finite number, where it is none and that is known."""
    has_odd_sample: bool = False
    """Whether that is because a sample has a number that is not finite."""


def evaluate(
    model: nn.Module,
    criterion: nn.Module,
    shards: DataShardManager,
    split: str,
    world: World,
    batch_size: int,
    device: torch.device,
    collect: bool = False,
    before_batch: Callable[[], object] = lambda: None,
) -> Evaluation:
    """Judge ``model`` on a split; a collective of all ranks. With ``collect``, rank 0 gets single forecasts.
    ``before_batch`` may raise, to end it.

    Raise ValueError for an empty split.
    """
    count = shards.count(split)
    if count == 0:
        raise ValueError(f"the split {split!r} of the dataset has no samples, so there is nothing to evaluate")
    first, last = SharedWork(world).part(count, batch_size if collect else 1)
    was_training = model.training
    model.eval()
    kept = spread_positions(count) if collect else np.arange(0)
    begin, end = np.searchsorted(kept, (first, last))
    forecasts = np.empty((end - begin, _FIELDS))
    sums = _sums(np.empty((0, _FIELDS)))
    with torch.no_grad():
        for chunk in range(first, last, size := max(1, CHUNK // batch_size) * batch_size):
            table = np.empty((min(size, last - chunk), _FIELDS))
            for start in range(chunk, chunk + len(table), batch_size):
                before_batch()
                stop = min(start + batch_size, chunk + len(table))
                rows = shards.end_rows(split, np.arange(start, stop))
                windows, target = shards.gather(rows)
                windows, target = windows.to(device), target.to(device)
                table[start - chunk : stop - chunk] = _judge_batch(criterion, rows, model(windows), target)
            sums += _sums(table)
            some = slice(*np.searchsorted(kept[begin:end], (chunk, chunk + len(table))))
            forecasts[some] = table[kept[begin:end][some] - chunk]
    model.train(was_training)
    sums = world.all_reduce(torch.from_numpy(sums)).numpy()
    means = dict(zip(_SUMS, (sums / sums[0]).tolist(), strict=True))
    zero = means.pop("zero_squared_error")
    squared = means.pop("squared_error")
    metrics = {
        name: value for name, value in means.items() if name not in ("samples", "loss") and not math.isnan(value)
    }
    if not math.isnan(squared) and zero > 0:
        metrics["mse_to_zero"] = squared / zero
    predictions = _gather(forecasts, begin, len(kept), world) if collect else None
    return Evaluation(samples=count, loss=means["loss"], metrics=metrics, predictions=predictions)


def _judge_batch(criterion: Any, rows: NDArray, outputs: Tensor, target: Tensor) -> NDArray:
    """(B, 6) float64: row, target, loss, mu, sigma, nu."""
    returns = target if target.dim() == 1 else target[:, 0]
    nothing = torch.full_like(returns, math.nan)
    mu, sigma, nu = nothing, nothing, nothing
    if gives_predictive(criterion):
        predictive: Predictive = criterion.predictive(outputs)
        mu, sigma, nu = predictive.mu, predictive.sigma, predictive.nu
    elif callable(getattr(criterion, "point", None)):
        mu = criterion.point(outputs)
    columns = (returns, criterion(outputs, target), mu, sigma, nu)
    return np.column_stack([rows, *(column.double().cpu().numpy() for column in columns)])


_SUMS = ("samples", "loss", "nll", "pinball", "coverage_90", "squared_error", "zero_squared_error")


def _sums(table: NDArray) -> NDArray:
    """Return the figures that add up over ranks; NaN if the loss predicts no such thing."""
    predictions = _predictions(table)
    judged = {name: values.sum() for name, values in score_forecast(predictions.predictive, predictions.target).items()}
    named = {
        "samples": len(table),
        "loss": predictions.loss.sum(),
        **judged,
        "squared_error": ((predictions.target - predictions.mu) ** 2).sum(),
        "zero_squared_error": (predictions.target**2).sum(),
    }
    return np.array([named.get(name, 0.0 if not len(table) else math.nan) for name in _SUMS])


def _predictions(table: NDArray) -> Predictions:
    row, target, loss, mu, sigma, nu = (np.ascontiguousarray(column) for column in table.T)
    return Predictions(row.astype(np.int64), target, loss, mu, sigma, nu)


def _gather(table: NDArray, first: int, count: int, world: World) -> Predictions | None:
    """All ranks' parts on rank 0, each in its place: a sum, in which the others' parts are nothing."""
    whole = torch.zeros(count, _FIELDS, dtype=torch.float64)
    whole[first : first + len(table)] = torch.from_numpy(table)
    world.all_reduce(whole)
    return _predictions(whole.numpy()) if world.rank == 0 else None


def final_report(
    model: nn.Module,
    criterion: nn.Module,
    shards: DataShardManager,
    world: World,
    device: torch.device,
    run_dir: RunDir,
    batch_size: int = 1024,
    begin: Callable[[FinishStage], object] = lambda stage: None,
) -> dict[str, Any]:
    """Judge the model on the test split against the baselines; a collective that returns the same report on all ranks,
    which share the work. ``begin`` is called with each stage of it, as it begins.

    Rank 0 writes ``predictions.npz`` (row, date, ticker's code, target, loss, mu, sigma, nu; ``tickers`` holds the
    names by code) and ``evaluation.json``. Raise ValueError where the loss is not finite, before anything is written.
    """
    begin("test split")
    evaluation = evaluate(model, criterion, shards, "test", world, batch_size, device, collect=True)
    if not math.isfinite(evaluation.loss):
        raise ValueError(
            f"the loss on the test split is {evaluation.loss}: the model's outputs have overflowed; "
            "lower training.learning_rate or training.clip_norm"
        )
    begin("baselines")
    scores = judge_baselines(shards, "test", SharedWork(world))
    begin("report")
    report: dict[str, Any] = {}
    if evaluation.predictions is not None:
        predictions = evaluation.predictions
        days = shards.dates(predictions.row).astype("datetime64[D]")
        report = build_report(predictions, days, scores, shards.spec.horizon)
        codes = shards.tickers(predictions.row)
        _write_predictions(run_dir, predictions, days, codes, np.array(shards.tickers_by_code))
        run_dir.write_json(EVALUATION, report)
    world.barrier()  # rank 0 takes the longer to write, the more data there is
    return world.all_gather_object(report)[0]


def _write_predictions(
    run_dir: RunDir, predictions: Predictions, days: NDArray, codes: NDArray, names: NDArray
) -> None:
    buffer = io.BytesIO()
    columns = {name: getattr(predictions, name) for name in ("row", "target", "loss", "mu", "sigma", "nu")}
    np.savez_compressed(buffer, date=days, ticker=codes.astype(np.int32), tickers=names, **columns)
    run_dir.storage.write(PREDICTIONS, buffer.getvalue())
