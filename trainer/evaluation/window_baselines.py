"""Baselines that a model has to beat on the same windows: forecasts of volatility that need little training.

All are fitted on the training split alone; the ridge penalty is chosen on the validation split. Each volatility
forecast becomes a Student-t distribution with mean zero, whose scale factor and degrees of freedom are fitted by
maximum likelihood on the training split: a baseline loses by its forecast and not by its tails. Of a large split a part
is used, evenly spread (`trainer.data.sampler.spread_positions`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.data.sampler import spread_positions
from trainer.evaluation.evaluate import SharedWork
from trainer.model.losses import Predictive

if TYPE_CHECKING:
    from trainer.data.shards import DataShardManager

Array = NDArray[np.float64]

HAR = ("log_rv_1", "log_rv_5", "log_rv_22")
HAR_X = (*HAR, "index_log_rv_5", "index_log_rv_22")
CHUNK = 8192
PENALTIES = tuple(10.0**k for k in range(-4, 3))
"""Ridge penalties per training sample, for standardised inputs."""
GRID = 2.0**-30
"""Sums of multiples of it are exact in any order as long as they stay below 2**23. Sums over standardised features stay
near the number of samples, of which `trainer.data.sampler.MOST_JUDGED`, 2**19, are looked at."""


@dataclass(frozen=True, slots=True)
class BaselineForecast:
    """A forecast for each sample. ``mu`` (n,); ``sigma`` (n,) is the Student-t scale, None for a forecast of the
    mean."""

    mu: Array
    sigma: Array | None = None
    nu: float = math.inf

    @property
    def predictive(self) -> Predictive | None:
        """Return the distribution, None of a forecast of the mean alone."""
        if self.sigma is None:
            return None
        mu, sigma = torch.from_numpy(self.mu), torch.from_numpy(self.sigma)
        return Predictive(mu, sigma, torch.full_like(sigma, self.nu))


class BaselineFits:
    """The baselines of one split, fitted by ranks that share the work, and their forecasts for its windows:

    - ``constant``: zero mean and one scale per ticker;
    - ``last_value``: the realised volatility of the last five days;
    - ``ewma``: RiskMetrics' exponentially weighted variance;
    - ``har``: log realised volatility regressed on its own over a day, a week and a month (Corsi 2009, in logs);
    - ``har_x``: HAR with the index's volatility besides;
    - ``ridge``: log realised volatility regressed on the whole window;
    - ``drift``: the mean of the training targets, mean only;
    - ``ridge_mean``: the return itself regressed on the whole window, mean only.
    """

    def __init__(self, shards: DataShardManager, split: str, work: SharedWork) -> None:
        """A collective."""
        self._shards = shards
        self._train, self._judged = (
            shards.end_rows(part, spread_positions(shards.count(part))) for part in ("train", split)
        )
        self._target = shards.column(shards.spec.target, self._train).astype(np.float64)
        known = set(shards.spec.features)
        needs = {"constant": (), "last_value": ("log_rv_5",), "ewma": (), "har": HAR, "har_x": HAR_X}
        quick = (name for name, columns in needs.items() if known.issuperset(columns))
        self.names = (*quick, "ridge", "drift", "ridge_mean")
        """Those whose columns are features."""
        self._ridge = self._fit_ridge(work)

    def forecast(self, name: str) -> BaselineForecast:
        """Return the forecast of one of `names`, in order of position."""
        shards, train, judged = self._shards, self._train, self._judged
        if name == "drift":
            return BaselineForecast(np.full(len(judged), self._target.mean()))
        if name == "ridge_mean":
            return BaselineForecast(self._ridge[len(train) :, 1])
        if name == "ridge":
            volatility = np.exp(self._ridge[:, 0])
            return self._distribution(volatility[: len(train)], volatility[len(train) :])
        if name == "constant":
            return self._distribution(*_constant(shards, train, judged, self._target))
        if name in ("har", "har_x"):
            return self._distribution(*_regression(shards, HAR if name == "har" else HAR_X, train, judged))
        column, of_column = ("log_rv_5", np.exp) if name == "last_value" else ("ewma_variance", np.sqrt)
        return self._distribution(*(of_column(_columns(shards, (column,), rows)[:, 0]) for rows in (train, judged)))

    def _fit_ridge(self, work: SharedWork) -> Array:
        """Return what ridge on the flattened window says (n + m, 2) of log realised volatility and of the return, for
        the training windows and for those that are judged. A collective.

        The two regressions share the Gram matrix, which is summed over pieces: memory does not grow with the data. The
        penalty is chosen on the validation split. Sums are rounded to a grid, so that they are the same at any number
        of ranks."""
        shards, train = self._shards, self._train
        valid = shards.end_rows("valid", spread_positions(shards.count("valid")))
        names = ("target_log_rv", shards.spec.target)
        targets = _columns(shards, names, train)
        centre = targets.mean(axis=0)
        size = shards.spec.window * len(shards.spec.features)

        sums = np.zeros((size, size + 2))
        for part, x in _windows(shards, train, work):
            sums[:, :size] += _on_grid(x.T @ x)
            sums[:, size:] += _on_grid(x.T @ (targets[part] - centre).astype(np.float32))
        sums = work.sum(sums)
        values, vectors = np.linalg.eigh(sums[:, :size] / len(train))
        rotated = vectors.T @ (sums[:, size:] / len(train))
        paths = np.stack([vectors @ (rotated / (values + penalty)[:, None]) for penalty in PENALTIES])

        observed = _columns(shards, names, valid) - centre
        errors = np.zeros((len(PENALTIES), 2))
        for part, x in _windows(shards, valid, work):
            errors += _on_grid(np.array([((x @ path - observed[part]) ** 2).sum(axis=0) for path in paths]))
        least = work.sum(errors).argmin(axis=0)
        weights = np.column_stack([paths[place][:, index] for index, place in enumerate(least)])

        found = np.zeros((len(train) + len(self._judged), 2))
        for rows, offset in ((train, 0), (self._judged, len(train))):
            for part, x in _windows(shards, rows, work):
                found[offset + part.start : offset + part.stop] = x @ weights
        return work.sum(found) + centre

    def _distribution(self, fitted: Array, forecast: Array) -> BaselineForecast:
        """Return the distribution of a forecast of volatility, from what it says of the training windows."""
        floor = np.quantile(fitted, 1e-3)  # a dead week has no volatility, and no likelihood survives that
        factor, nu = fit_student_t(self._target / np.maximum(fitted, floor))
        return BaselineForecast(np.zeros(len(self._judged)), factor * np.maximum(forecast, floor), nu)


def baseline_forecasts(shards: DataShardManager, split: str) -> dict[str, BaselineForecast]:
    """Return the forecasts of all baselines for the windows of ``split``, in order of position."""
    fits = BaselineFits(shards, split, SharedWork())
    return {name: fits.forecast(name) for name in fits.names}


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


def _windows(shards: DataShardManager, rows: NDArray, work: SharedWork) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """Yield this rank's part of the windows that end in ``rows``, `CHUNK` at a time, standardised and flattened: (slice
    of the samples, (n, W * F) float32)."""
    mean, std = (np.asarray(part, dtype=np.float32) for part in (shards.spec.feature_mean, shards.spec.feature_std))
    std[std == 0] = 1
    first, last = work.part(len(rows), CHUNK)
    for start in range(first, last, CHUNK):
        part = slice(start, min(start + CHUNK, last))
        windows = shards.gather(rows[part])[0].cpu().numpy()  # the data may be kept on a GPU
        yield part, ((windows - mean) / std).reshape(len(windows), -1)


def _on_grid(values: NDArray[np.floating]) -> Array:
    """Return the values as multiples of `GRID`."""
    return np.rint(values.astype(np.float64) / GRID) * GRID
