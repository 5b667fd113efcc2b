"""A model of windows on days after its own data, beside the baselines on the same windows: a likelihood alone says
little, since some times are more volatile than others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from dtrain_dagster.registry.run_model import RunModel
    from trainer.data.shards import DataShardManager

ALIKE = ("window", "features", "target", "horizon")


def judge_later_days(model: RunModel, shards: DataShardManager, after: np.datetime64, seconds: float) -> dict[str, Any]:
    """Return the model's NLL on the windows of the test split that end after this day, and by how much it is lower than
    each baseline's. ``seconds``: what its forecasts may take.

    ``nll`` is None if there is no such window, or the model forecasts no distribution. Raise ValueError if the model
    takes other windows than these, and `run_model.RunModelError` if it does not answer.
    """
    import numpy as np
    import torch

    from trainer.data.sampler import spread_positions
    from trainer.evaluation.baselines import baseline_forecasts
    from trainer.evaluation.report import gain, predictive_of, score_forecast
    from trainer.model.losses import Predictive

    for name in ALIKE:
        own, its = getattr(model.spec, name), getattr(shards.spec, name)
        if own != its:
            raise ValueError(
                f"the model's {name} is {own!r}, the dataset's {its!r}: it cannot be evaluated on this dataset"
            )
    rows = shards.end_rows("test", spread_positions(shards.count("test")))
    later = np.flatnonzero(shards.dates(rows) > after)
    days = shards.dates(rows[later])
    report: dict[str, Any] = {"windows": len(later), "days": len(np.unique(days)), "nll": None, "baselines": {}}
    if not len(later):
        return report
    windows, _ = shards.gather(rows[later])
    target = shards.column(shards.spec.target, rows[later]).astype(np.float64)
    columns = model.predict(windows.numpy(), seconds)
    if "sigma" not in columns:
        return report
    nu = columns.get("nu", np.full(len(later), np.inf))
    own = score_forecast(Predictive(*map(torch.from_numpy, (columns["mu"], columns["sigma"], nu))), target)
    for name, forecast in baseline_forecasts(shards, "test").items():
        if forecast.sigma is not None:
            part = replace(forecast, mu=forecast.mu[later], sigma=forecast.sigma[later])
            other = score_forecast(predictive_of(part), target)
            report["baselines"][name] = {
                "nll": float(other["nll"].mean()),
                **gain(own, other, days, shards.spec.horizon),
            }
    return {**report, "nll": float(own["nll"].mean()), "first_date": str(days.min()), "last_date": str(days.max())}
