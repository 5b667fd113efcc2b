"""Baselines that a model has to beat on the same windows: forecasts of volatility that need little training.

All are fitted on the training split alone; the ridge penalty is chosen on the validation split. Each volatility
forecast becomes a Student-t distribution with mean zero, whose scale factor and degrees of freedom are fitted by
maximum likelihood on the training split: a baseline loses by its forecast and not by its tails. Of a large split a part
is used, evenly spread (`trainer.data.sampler.spread_positions`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainer.data.sampler import spread_positions
from trainer.evaluation.piece_work import PieceWork, Stage, on_grid
from trainer.evaluation.shared_work import SharedWork

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


class BaselineFits:
    """The baselines of one split: what they are fitted on, and their forecasts for its windows, one by one."""

    def __init__(self, shards: DataShardManager, split: str) -> None:
        self._shards = shards
        self._train, self._judged = (
            shards.end_rows(part, spread_positions(shards.count(part))) for part in ("train", split)
        )
        self._target = shards.column(shards.spec.target, self._train).astype(np.float64)
        known = set(shards.spec.features)
        needs = {"constant": (), "last_value": ("log_rv_5",), "ewma": (), "har": HAR, "har_x": HAR_X}
        self.names = tuple(name for name, columns in needs.items() if known.issuperset(columns))
        """The forecasts of volatility that are quick to make; `ridge` makes another."""

    def forecast(self, name: str) -> BaselineForecast:
        """Return the forecast of one of `names`."""
        shards, train, judged = self._shards, self._train, self._judged
        if name == "constant":
            return self.distribution(*_constant(shards, train, judged, self._target))
        if name in ("har", "har_x"):
            return self.distribution(*_regression(shards, HAR if name == "har" else HAR_X, train, judged))
        column, of_column = ("log_rv_5", np.exp) if name == "last_value" else ("ewma_variance", np.sqrt)
        return self.distribution(*(of_column(_columns(shards, (column,), rows)[:, 0]) for rows in (train, judged)))

    @property
    def ridge_stages(self) -> tuple[Callable[[Array], Stage], ...]:
        """Return ridge on the flattened window, for log realised volatility and for the return, as work in pieces of
        windows. Its result is (n + m, 2): both, for the training windows and for those that are judged.

        The two regressions share the Gram matrix, which is summed over pieces: memory does not grow with the data. The
        penalty is chosen on the validation split."""
        shards, train = self._shards, self._train
        valid = shards.end_rows("valid", spread_positions(shards.count("valid")))
        names = ("target_log_rv", shards.spec.target)
        targets = _columns(shards, names, train)
        centre = targets.mean(axis=0)
        size = shards.spec.window * len(shards.spec.features)

        def sum_products(_: Array) -> Stage:
            def add(piece: int, sums: Array) -> None:
                part, x = _windows(shards, train, piece)
                sums[:, :size] += on_grid(x.T @ x)
                sums[:, size:] += on_grid(x.T @ (targets[part] - centre).astype(np.float32))

            def solve(sums: Array) -> Array:
                """(P, W * F, 2): the weights for each penalty."""
                values, vectors = np.linalg.eigh(sums[:, :size] / len(train))
                rotated = vectors.T @ (sums[:, size:] / len(train))
                return np.stack([vectors @ (rotated / (values + penalty)[:, None]) for penalty in PENALTIES])

            return Stage(_pieces(train), (size, size + 2), add, solve)

        def choose_penalty(paths: Array) -> Stage:
            observed = _columns(shards, names, valid) - centre

            def add(piece: int, errors: Array) -> None:
                part, x = _windows(shards, valid, piece)
                errors += on_grid(np.array([((x @ path - observed[part]) ** 2).sum(axis=0) for path in paths]))

            def choose(errors: Array) -> Array:
                """(W * F, 2): the weights with the least error."""
                return np.column_stack([paths[place][:, index] for index, place in enumerate(errors.argmin(axis=0))])

            return Stage(_pieces(valid), (len(PENALTIES), 2), add, choose)

        def predict(weights: Array) -> Stage:
            first = _pieces(train)

            def add(piece: int, found: Array) -> None:
                rows, number, offset = (train, piece, 0) if piece < first else (self._judged, piece - first, len(train))
                part, x = _windows(shards, rows, number)
                found[offset + part.start : offset + part.stop] = x @ weights

            shape = (len(train) + len(self._judged), 2)
            return Stage(first + _pieces(self._judged), shape, add, lambda found: found + centre)

        return sum_products, choose_penalty, predict

    def ridge(self, found: Array) -> BaselineForecast:
        """Return the distribution that ridge forecasts, from the result of `ridge_stages`."""
        count, volatility = len(self._train), np.exp(found[:, 0])
        return self.distribution(volatility[:count], volatility[count:])

    def ridge_mean(self, found: Array) -> BaselineForecast:
        """Return ridge's forecast of the mean, from the result of `ridge_stages`."""
        return BaselineForecast(found[len(self._train) :, 1])

    def drift(self) -> BaselineForecast:
        """Return the mean of the training targets as a forecast."""
        return BaselineForecast(np.full(len(self._judged), self._target.mean()))

    def distribution(self, fitted: Array, forecast: Array) -> BaselineForecast:
        """Return the distribution of a forecast of volatility, from what it says of the training windows."""
        floor = np.quantile(fitted, 1e-3)  # a dead week has no volatility, and no likelihood survives that
        factor, nu = fit_student_t(self._target / np.maximum(fitted, floor))
        return BaselineForecast(np.zeros(len(self._judged)), factor * np.maximum(forecast, floor), nu)


def baseline_forecasts(shards: DataShardManager, split: str) -> dict[str, BaselineForecast]:
    """Return forecasts for the windows of ``split`` in order of position, without those whose columns are no features.

    - ``constant``: zero mean and one scale per ticker;
    - ``last_value``: the realised volatility of the last five days;
    - ``ewma``: RiskMetrics' exponentially weighted variance;
    - ``har``: log realised volatility regressed on its own over a day, a week and a month (Corsi 2009, in logs);
    - ``har_x``: HAR with the index's volatility besides;
    - ``ridge``: log realised volatility regressed on the whole window;
    - ``drift``: the mean of the training targets, mean only;
    - ``ridge_mean``: the return itself regressed on the whole window, mean only.
    """
    fits = BaselineFits(shards, split)
    forecasts = {name: fits.forecast(name) for name in fits.names}
    found = PieceWork(fits.ridge_stages).complete(SharedWork())
    return {**forecasts, "ridge": fits.ridge(found), "drift": fits.drift(), "ridge_mean": fits.ridge_mean(found)}


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


def _pieces(rows: NDArray) -> int:
    """Return the number of pieces of `CHUNK` windows, the last of which may be smaller."""
    return -(-len(rows) // CHUNK)


def _windows(shards: DataShardManager, rows: NDArray, piece: int) -> tuple[slice, NDArray[np.float32]]:
    """Return a piece of the windows that end in ``rows``, standardised and flattened: (slice of the samples, (n, W * F)
    float32)."""
    mean, std = (np.asarray(part, dtype=np.float32) for part in (shards.spec.feature_mean, shards.spec.feature_std))
    std[std == 0] = 1
    part = slice(piece * CHUNK, min((piece + 1) * CHUNK, len(rows)))
    windows = shards.gather(rows[part])[0].cpu().numpy()  # the data may be kept on a GPU
    return part, ((windows - mean) / std).reshape(len(windows), -1)
