"""The baselines on the windows that the model is judged on, as work that ranks share.

No model is needed for it: ranks do as much of it as they can while they wait for each other, and the rest at the end.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.sampler import spread_positions
from trainer.evaluation.baselines import BaselineFits, BaselineForecast
from trainer.evaluation.piece_work import Array, PieceWork, Stage
from trainer.evaluation.report import JudgedBaseline, judge_baseline

if TYPE_CHECKING:
    from trainer.data.shards import DataShardManager
    from trainer.evaluation.shared_work import SharedWork

MEANS = ("nll", "pinball", "coverage_90")


class BaselineJudgement:
    """The scores of all baselines (`trainer.evaluation.baselines.baseline_forecasts`) on a split: ridge in pieces of
    windows, then each baseline as a piece of its own."""

    def __init__(self, shards: DataShardManager, split: str) -> None:
        """Nothing is read yet."""
        self._shards, self._split = shards, split

    @cached_property
    def work(self) -> PieceWork:
        """Return the work, of which any part may be done before the scores are asked for."""
        return PieceWork((*self._fits.ridge_stages, self._judge_each))

    def scores(self, work: SharedWork) -> dict[str, JudgedBaseline]:
        """Return the scores, on all ranks, after what is left of the work has been done. A collective."""
        found = {}
        for name, row in zip(self._names, self.work.complete(work), strict=True):
            *means, mse = row[: len(MEANS) + 1].tolist()
            has_distribution = not np.isnan(means[0])
            found[name] = JudgedBaseline(
                dict(zip(MEANS, means, strict=True)) if has_distribution else {},
                None if np.isnan(mse) else mse,
                row[len(MEANS) + 1 :] if has_distribution else None,
            )
        return found

    @cached_property
    def _fits(self) -> BaselineFits:
        return BaselineFits(self._shards, self._split)

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self._fits.names, "ridge", "drift", "ridge_mean")

    def _judge_each(self, ridge: Array) -> Stage:
        """Return the stage whose result has a row for each baseline: `MEANS`, the squared error over that of zero, and
        the NLL of each window; NaN where a baseline has none."""
        fits = self._fits
        rows = self._shards.end_rows(self._split, spread_positions(self._shards.count(self._split)))
        target = self._shards.column(self._shards.spec.target, rows).astype(np.float64)

        def forecast(name: str) -> BaselineForecast:
            if name in ("ridge", "ridge_mean"):
                return fits.ridge(ridge) if name == "ridge" else fits.ridge_mean(ridge)
            return fits.drift() if name == "drift" else fits.forecast(name)

        def add(piece: int, found: Array) -> None:
            judged = judge_baseline(forecast(self._names[piece]), target)
            mse = np.nan if judged.mse_to_zero is None else judged.mse_to_zero
            figures = [*(judged.means.get(mean, np.nan) for mean in MEANS), mse]
            found[piece] = np.r_[figures, np.full(len(target), np.nan) if judged.nll is None else judged.nll]

        shape = (len(self._names), len(MEANS) + 1 + len(target))
        return Stage(len(self._names), shape, add, lambda found: found)
