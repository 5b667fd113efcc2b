"""Baselines that a model has to beat on the same windows: forecasts of volatility that need little training.

All are fitted on the training split alone; the ridge penalty is chosen on the validation split. Each volatility
forecast becomes a Student-t distribution with mean zero, whose scale factor and degrees of freedom are fitted by
maximum likelihood on the training split: a baseline loses by its forecast and not by its tails. Of a large split a part
is used, evenly spread (`trainer.data.sampler.spread_positions`). Numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainer.data.sampler import spread_positions

if TYPE_CHECKING:
    from trainer.data.shards import DataShardManager

Array = NDArray[np.float64]

HAR = ("log_rv_1", "log_rv_5", "log_rv_22")
HAR_X = (*HAR, "index_log_rv_5", "index_log_rv_22")
CHUNK = 8192
PENALTIES = tuple(10.0**k for k in range(-4, 3))
"""Ridge penalties per training sample, for standardised inputs."""


@dataclass(frozen=True, slots=True)
class BaselineForecast:
    """A forecast for each sample. ``mu`` (n,); ``sigma`` (n,) is the Student-t scale, None for a forecast of the
    mean."""

    mu: Array
    sigma: Array | None = None
    nu: float = math.inf


def baseline_forecasts(
    shards: DataShardManager, split: str, only: Collection[str] | None = None
) -> dict[str, BaselineForecast]:
    """Return forecasts for the windows of ``split`` in order of position, without those whose columns are no features.
    ``only``: names among the first five to compute; it leaves out ridge, which takes longest.

    - ``constant``: zero mean and one scale per ticker;
    - ``last_value``: the realised volatility of the last five days;
    - ``ewma``: RiskMetrics' exponentially weighted variance;
    - ``har``: log realised volatility regressed on its own over a day, a week and a month (Corsi 2009, in logs);
    - ``har_x``: HAR with the index's volatility besides;
    - ``ridge``: log realised volatility regressed on the whole window;
    - ``drift``: the mean of the training targets, mean only;
    - ``ridge_mean``: the return itself regressed on the whole window, mean only.
    """
    train, judged = (shards.end_rows(part, spread_positions(shards.count(part))) for part in ("train", split))
    target = shards.column(shards.spec.target, train).astype(np.float64)
    volatility = {"constant": _constant(shards, train, judged, target)}
    if "log_rv_5" in shards.spec.features:
        volatility["last_value"] = tuple(
            np.exp(_columns(shards, ("log_rv_5",), rows)[:, 0]) for rows in (train, judged)
        )
    volatility["ewma"] = tuple(np.sqrt(_columns(shards, ("ewma_variance",), rows)[:, 0]) for rows in (train, judged))
    for name, columns in (("har", HAR), ("har_x", HAR_X)):
        if set(columns) <= set(shards.spec.features):
            volatility[name] = _regression(shards, columns, train, judged)
    if only is None:
        volatility["ridge"], ridge_mean = _ridge(shards, train, judged)
    forecasts = {}
    for name, (fitted, forecast) in volatility.items():
        if only is not None and name not in only:
            continue
        floor = np.quantile(fitted, 1e-3)  # a dead week has no volatility, and no likelihood survives that
        factor, nu = fit_student_t(target / np.maximum(fitted, floor))
        forecasts[name] = BaselineForecast(np.zeros(len(judged)), factor * np.maximum(forecast, floor), nu)
    if only is not None:
        return forecasts
    drift = BaselineForecast(np.full(len(judged), target.mean()))
    return {**forecasts, "drift": drift, "ridge_mean": BaselineForecast(ridge_mean)}


def fit_student_t(z: Array) -> tuple[float, float]:
    """Return scale and degrees of freedom (2.1 to 200) of a zero-mean Student-t by maximum likelihood.

    Raise ValueError if all ``z`` are zero.

    For each nu the scale solves a fixed point (the EM step of a scale mixture); nu is found by golden section over
    log nu, along which the profile likelihood has one optimum.
    """
    z2 = z**2
    scale2 = float(np.median(z2)) or float(z2.mean())
    if scale2 <= 0:
        raise ValueError("the training targets are all zero, so no distribution can be fitted to them")
    # The likelihood depends on z² only and smoothly on its logarithm: a fine histogram stands for the samples.
    counts, edges = np.histogram(np.log(np.maximum(z2, 1e-8 * scale2)), bins=4000)
    z2 = np.exp((edges[1:] + edges[:-1]) / 2)
    weights = counts / counts.sum()

    def best_scale2(nu: float) -> float:
        current = scale2
        for _ in range(200):
            following = float(weights @ ((nu + 1) * z2 / (nu + z2 / current)))
            if abs(following / current - 1) < 1e-9:
                break
            current = following
        return current

    def nll(log_nu: float) -> float:
        nu = math.exp(log_nu)
        at = best_scale2(nu)
        constant = math.lgamma(nu / 2) - math.lgamma((nu + 1) / 2) + 0.5 * math.log(nu * math.pi * at)
        return constant + (nu + 1) / 2 * float(weights @ np.log1p(z2 / at / nu))

    low, high = math.log(2.1), math.log(200.0)
    ratio = (math.sqrt(5) - 1) / 2
    while high - low > 1e-4:
        inner_low, inner_high = high - ratio * (high - low), low + ratio * (high - low)
        if nll(inner_low) < nll(inner_high):
            high = inner_high
        else:
            low = inner_low
    nu = math.exp((low + high) / 2)
    return math.sqrt(best_scale2(nu)), nu


def _columns(shards: DataShardManager, names: tuple[str, ...], rows: NDArray) -> Array:
    """(n, len(names)) float64."""
    return np.column_stack([shards.column(name, rows) for name in names]).astype(np.float64)


def _constant(shards: DataShardManager, train: NDArray, judged: NDArray, target: Array) -> tuple[Array, ...]:
    """Root mean square of each ticker's training targets; of all of them for a ticker that has none."""
    known, codes = np.unique(shards.tickers(train), return_inverse=True)
    scale = np.sqrt(np.bincount(codes, weights=target**2) / np.bincount(codes))
    tickers = shards.tickers(judged)
    places = np.searchsorted(known, tickers).clip(max=len(known) - 1)
    everyone = math.sqrt(float(np.mean(target**2)))
    return scale[codes], np.where(known[places] == tickers, scale[places], everyone)


def _regression(
    shards: DataShardManager, columns: tuple[str, ...], train: NDArray, judged: NDArray
) -> tuple[Array, ...]:
    """Least squares of the log realised volatility on ``columns`` of the last day, back on the scale of volatility."""
    design, new = (np.column_stack([np.ones(len(rows)), _columns(shards, columns, rows)]) for rows in (train, judged))
    weights = np.linalg.lstsq(design, _columns(shards, ("target_log_rv",), train)[:, 0], rcond=None)[0]
    return np.exp(design @ weights), np.exp(new @ weights)


def _ridge(shards: DataShardManager, train: NDArray, judged: NDArray) -> tuple[tuple[Array, ...], Array]:
    """Ridge on the flattened window for log realised volatility and for the return: their normal equations share the
    Gram matrix, which is summed over chunks, so memory does not grow with the data."""
    valid = shards.end_rows("valid", spread_positions(shards.count("valid")))
    names = ("target_log_rv", shards.spec.target)
    targets = _columns(shards, names, train)
    centre = targets.mean(axis=0)
    size = shards.spec.window * len(shards.spec.features)
    gram, moments = np.zeros((size, size)), np.zeros((size, 2))
    for part, x in _windows(shards, train):
        gram += x.T @ x
        moments += x.T @ (targets[part] - centre).astype(np.float32)
    values, vectors = np.linalg.eigh(gram / len(train))
    rotated = vectors.T @ (moments / len(train))
    paths = [vectors @ (rotated / (values + penalty)[:, None]) for penalty in PENALTIES]
    errors = np.zeros((len(PENALTIES), 2))
    observed = _columns(shards, names, valid) - centre
    for part, x in _windows(shards, valid):
        errors += [((x @ path - observed[part]) ** 2).sum(axis=0) for path in paths]
    chosen = np.column_stack([paths[best][:, index] for index, best in enumerate(errors.argmin(axis=0))])
    fitted, forecast = (
        np.concatenate([x @ chosen for _, x in _windows(shards, rows)]) + centre for rows in (train, judged)
    )
    return (np.exp(fitted[:, 0]), np.exp(forecast[:, 0])), forecast[:, 1]


def _windows(shards: DataShardManager, rows: NDArray) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """Chunks of standardised, flattened windows: (slice of the samples, (n, W * F) float32)."""
    mean, std = (np.asarray(part, dtype=np.float32) for part in (shards.spec.feature_mean, shards.spec.feature_std))
    std[std == 0] = 1
    for start in range(0, len(rows), CHUNK):
        part = slice(start, min(start + CHUNK, len(rows)))
        windows = np.asarray(shards.gather(rows[part])[0], dtype=np.float32)
        yield part, ((windows - mean) / std).reshape(len(windows), -1)
