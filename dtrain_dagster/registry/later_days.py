"""A model of windows on days after its own data, beside the baselines on the same windows: a likelihood alone says
little, since some times are more volatile than others."""

from __future__ import annotations

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
    from trainer.evaluation.window_report import gain, judge_baselines
    from trainer.model.losses import student_t_nll

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
    columns = model.predict(windows.numpy(), seconds)
    if "sigma" not in columns:
        return report
    nu = columns.get("nu", np.full(len(later), np.inf))
    mine, target = columns["mu"], shards.column(shards.spec.target, rows[later]).astype(np.float64)
    nll = student_t_nll(*map(torch.from_numpy, (mine, columns["sigma"], nu, target))).numpy()
    for name, item in judge_baselines(shards, "test").items():
        if item.nll is not None:
            other = item.nll[later]
            report["baselines"][name] = {
                "nll": float(other.mean()),
                **gain(nll, other, days, shards.spec.horizon),
            }
    return {**report, "nll": float(nll.mean()), "first_date": str(days.min()), "last_date": str(days.max())}
