"""The baselines on the windows that the model is judged on, with the work divided among all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainer.data.sampler import spread_positions
from trainer.evaluation.baselines import BaselineFits
from trainer.evaluation.report import JudgedBaseline, judge_baseline
from trainer.evaluation.shared_work import SharedWork

if TYPE_CHECKING:
    from trainer.comm.world import World
    from trainer.data.shards import DataShardManager

MEANS = ("nll", "pinball", "coverage_90")


def judge_baselines(shards: DataShardManager, split: str, world: World | None = None) -> dict[str, JudgedBaseline]:
    """Return the scores of all baselines (`trainer.evaluation.baselines.baseline_forecasts`) on a split, on all ranks
    of the ``world``. A collective: ridge, which takes longest, is computed by all ranks together, each on its part of
    the windows; of the others each rank fits and judges its own."""
    work, fits = SharedWork(world), BaselineFits(shards, split)
    rows = shards.end_rows(split, spread_positions(shards.count(split)))
    target = shards.column(shards.spec.target, rows).astype(np.float64)
    ridge, ridge_mean = fits.ridge(work)
    names = ("ridge", *fits.names)
    nll, figures = np.zeros((len(names), len(rows))), np.zeros((len(names), len(MEANS) + 1))
    for place in range(work.rank, len(names), work.size):
        name = names[place]
        judged = judge_baseline(fits.distribution(*ridge) if name == "ridge" else fits.forecast(name), target)
        nll[place] = judged.nll
        figures[place] = [*(judged.means[mean] for mean in MEANS), _number(judged.mse_to_zero)]
    nll, figures = work.sum(nll), work.sum(figures)
    found = {}
    for name, row, own in zip(names, figures.tolist(), nll, strict=True):
        *means, mse = row
        found[name] = JudgedBaseline(dict(zip(MEANS, means, strict=True)), None if np.isnan(mse) else mse, own)
    means_alone = {"drift": fits.drift(), "ridge_mean": ridge_mean}
    of_means = {name: judge_baseline(forecast, target) for name, forecast in means_alone.items()}
    return {**{name: found[name] for name in (*fits.names, "ridge")}, **of_means}


def _number(value: float | None) -> float:
    return np.nan if value is None else value
