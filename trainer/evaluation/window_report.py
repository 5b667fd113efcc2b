"""The content of ``evaluation.json``, computed from forecasts: proper scores, baselines, calibration, notes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.data.sampler import spread_positions
from trainer.evaluation import window_scores as scores
from trainer.evaluation.evaluate import SharedWork
from trainer.evaluation.gate import gate_document, is_beyond_chance, suspect_leak
from trainer.evaluation.window_baselines import BaselineFits, BaselineForecast
from trainer.evaluation.window_scores import Array
from trainer.model.losses import Predictive

if TYPE_CHECKING:
    from trainer.data.shards import DataShardManager

PROPER_SCORES = ("nll", "pinball", "coverage_90")
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
REFERENCE = "har_x"
"""The baseline that quintiles are compared with."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """Forecasts of a whole split in order of position, shape (n,); NaN where the loss predicts no such thing."""

    row: NDArray[np.int64]
    target: Array
    loss: Array
    mu: Array
    sigma: Array
    nu: Array

    @property
    def predictive(self) -> Predictive | None:
        """Return the predicted distribution, None if the loss predicts none."""
        if not len(self.sigma) or np.isnan(self.sigma).any():
            return None
        return Predictive(*(torch.from_numpy(array) for array in (self.mu, self.sigma, self.nu)))


def score_forecast(predictive: Predictive | None, target: Array) -> dict[str, Array]:
    """Return proper scores per sample (n,): ``nll``, ``pinball`` (mean over `QUANTILES`, in the target's unit) and
    ``coverage_90`` (1 inside the central 90 % interval, 0 outside). Empty where there is no distribution."""
    if predictive is None:
        return {}
    y = torch.from_numpy(target)
    levels = {q: predictive.quantile(q) for q in QUANTILES}
    pinball = [torch.maximum(q * (y - at), (q - 1) * (y - at)) for q, at in levels.items()]
    covered = (y >= levels[0.05]) & (y <= levels[0.95])
    return {
        "nll": predictive.nll(y).numpy(),
        "pinball": torch.stack(pinball).mean(0).numpy(),
        "coverage_90": covered.double().numpy(),
    }


@dataclass(frozen=True, slots=True)
class JudgedBaseline:
    """A baseline's scores on the windows that the model is judged on."""

    means: Mapping[str, float]
    """The means of `score_forecast`; empty for a baseline of the mean alone."""
    mse_to_zero: float | None
    nll: Array | None = None
    """(n,): per window, for the paired comparison with the model; None for a baseline of the mean alone."""


def judge_baseline(forecast: BaselineForecast, target: Array) -> JudgedBaseline:
    """Return the scores of a baseline's forecast for windows with these targets (n,)."""
    judged = score_forecast(forecast.predictive, target)
    return JudgedBaseline(_means(judged), scores.mse_to_zero(forecast.mu, target), judged.get("nll"))


def judge_baselines(shards: DataShardManager, split: str, work: SharedWork | None = None) -> dict[str, JudgedBaseline]:
    """Return the scores of all baselines (`trainer.evaluation.window_baselines`) on a split, each judged by one of the
    ranks. A collective; None: by this process alone."""
    work = work or SharedWork()
    fits = BaselineFits(shards, split, work)
    rows = shards.end_rows(split, spread_positions(shards.count(split)))
    target = shards.column(shards.spec.target, rows).astype(np.float64)
    first, last = work.part(len(fits.names))
    mine = [judge_baseline(fits.forecast(name), target) for name in fits.names[first:last]]
    nll = np.array([np.full(len(target), np.nan) if item.nll is None else item.nll for item in mine])
    nll = work.join(nll.reshape(len(mine), len(target)), first, len(fits.names))
    told = [item for part in work.gather([[dict(item.means), item.mse_to_zero] for item in mine]) for item in part]
    return {
        name: JudgedBaseline(means, mse, row if means else None)
        for name, (means, mse), row in zip(fits.names, told, nll, strict=True)
    }


def build_report(
    predictions: Predictions,
    days: NDArray[np.datetime64],
    baselines: Mapping[str, JudgedBaseline],
    horizon: int,
) -> dict[str, Any]:
    """Return the content of ``evaluation.json``. ``days`` (n,) are the dates of the windows' ends, datetime64[D];
    ``horizon`` is in days and sets the lag of the t-statistics."""
    target = predictions.target
    own = score_forecast(predictions.predictive, target)
    has_mean = not np.isnan(predictions.mu).any()
    skill = scores.mean_skill(predictions.mu, target, days, horizon) if has_mean else {}
    parts = [part for part in scores.halves(days) if has_mean and part.any()]
    reference = baselines[REFERENCE].nll if REFERENCE in baselines else None
    report: dict[str, Any] = {
        "split": "test",
        "windows": len(target),
        "days": len(np.unique(days)),
        "first_date": str(days.min()),
        "last_date": str(days.max()),
        "model": {"loss": float(predictions.loss.mean()), **_means(own), **skill},
        "baselines": {
            name: {
                **item.means,
                **gain(own.get("nll"), item.nll, days, horizon),
                "mse_to_zero": item.mse_to_zero,
            }
            for name, item in baselines.items()
        },
        "calibration": _calibration(predictions.sigma, own, reference) if own else [],
        "halves": [scores.mean_skill(predictions.mu[part], target[part], days[part], horizon) for part in parts],
    }
    report["notes"] = notes(report)
    report["gate"] = gate_document(report)
    return report


def _means(judged: Mapping[str, Array], part: Any = slice(None)) -> dict[str, float]:
    return {name: float(values[part].mean()) for name, values in judged.items()}


def gain(own: Array | None, other: Array | None, days: NDArray, horizon: int) -> dict[str, float | None]:
    """Return by how much the model's NLL (n,) is lower, and the paired t-statistic over days; nothing where one of the
    two has none."""
    if own is None or other is None:
        return {}
    daily = scores.daily_means(other - own, days)
    t = scores.newey_west_t(daily, scores.newey_west_lag(len(daily), horizon))
    return {"model_gain_nll": float((other - own).mean()), "model_gain_t": t}


def _calibration(sigma: Array, own: Mapping[str, Array], reference: Array | None) -> list[dict[str, Any]]:
    """Scores within each fifth of the predicted scale, calm to stormy."""
    fifth = scores.quintiles(sigma)
    rows = []
    for index in np.unique(fifth):
        part = fifth == index
        row = {"quintile": int(index) + 1, "samples": int(part.sum()), "sigma_mean": float(sigma[part].mean())}
        row |= {} if reference is None else {f"nll_{REFERENCE}": float(reference[part].mean())}
        rows.append(row | _means(own, part))
    return rows


def notes(report: Mapping[str, Any]) -> list[str]:
    """Return sentences about the figures for a model card; each is computed, none assumed."""
    model, baselines = report["model"], report["baselines"]
    said = []
    if "nll" not in model:
        said.append("The loss predicts no distribution: likelihood, coverage and calibration were not judged.")
    else:
        said.append(_note_on_likelihood(model, baselines))
        cover = [row["coverage_90"] for row in report["calibration"]]
        said.append(
            f"The 90 % interval covered {model['coverage_90']:.1%} of the outcomes, between {min(cover):.1%} and "
            f"{max(cover):.1%} across fifths of the predicted volatility."
        )
    if "mse_to_zero" in model:
        said.append(_note_on_mean(model, baselines))
    leak = suspect_leak(report["halves"])
    if leak:
        said.append(f"Suspect leakage: {leak}.")
    said.append(
        f"Judged once, on {report['windows']:,} overlapping windows of {report['days']:,} days from "
        f"{report['first_date']} to {report['last_date']}; other periods may differ."
    )
    return said


def _note_on_likelihood(model: Mapping[str, Any], baselines: Mapping[str, Any]) -> str:
    judged = {name: row for name, row in baselines.items() if "nll" in row}
    if not judged:
        return f"NLL {model['nll']:.4f}; no baseline could be judged beside it."
    best = min(judged, key=lambda name: judged[name]["nll"])
    gain, t = judged[best]["model_gain_nll"], judged[best]["model_gain_t"]
    shown = f"NLL {model['nll']:.4f} against {judged[best]['nll']:.4f} of the best baseline, {best}"
    if t is None:
        return f"{shown}; too few days for a test."
    if not is_beyond_chance(t):
        return f"{shown}: a difference that could be chance (t = {t:.1f})."
    return f"{shown}: {'better' if gain > 0 else 'worse'} by {abs(gain):.4f} (t = {t:.1f})."


def _note_on_mean(model: Mapping[str, Any], baselines: Mapping[str, Any]) -> str:
    ratio, t = model["mse_to_zero"], model["mse_to_zero_t"]
    if ratio is None:
        return "The mean forecast could not be judged: the outcomes are all zero."
    shown = f"squared error {ratio:.4f} of a zero forecast's" + ("" if t is None else f", t = {t:.1f}")
    if ratio >= 1 or t is None or t < 2:
        return f"The mean forecast has no skill ({shown}): use the interval, not the direction."
    drift = baselines.get("drift", {}).get("mse_to_zero")
    if drift is not None and ratio >= drift:
        return f"The mean forecast is no better than the mean of the training years ({shown}; theirs {drift:.4f})."
    return f"The mean forecast beats zero ({shown}): look for a leak before you use it."
