"""How good is a trained model on days that came after it? ``python -m trainer.reassess --run-dir URI --dataset URI
--after DAY``.

Judges the model of a run directory on the windows of a newer dataset's test split that end after a day, beside the
baselines on the same windows: markets are calmer and stormier, so a likelihood says little by itself.

Prints one JSON line. Exit code 2 where the model cannot be judged on this dataset.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.baselines import Forecast, baseline_forecasts
from trainer.config import ConfigError
from trainer.losses import Predictive
from trainer.report import gain, judge, predictive_of
from trainer.rundir import RunDir
from trainer.sampler import spread
from trainer.saved_model import BATCH, FOLDER, SavedModel, SavedModelError, load_saved_model

if TYPE_CHECKING:
    from trainer.shards import DataShardManager

ALIKE = ("window", "features", "target", "horizon")


def reassess(saved: SavedModel, shards: DataShardManager, after: np.datetime64) -> dict[str, Any]:
    """The model's NLL on the windows that end after this day, and by how much it is lower than each baseline's;
    ``nll`` is None where there is no such window, or the model forecasts no distribution. ValueError where the model
    takes other windows than these."""
    for name in ALIKE:
        own, its = getattr(saved.spec, name), getattr(shards.spec, name)
        if own != its:
            raise ValueError(f"the model's {name} is {own!r}, the dataset's {its!r}: it cannot be judged on it")
    rows = shards.end_rows("test", spread(shards.count("test")))
    later = np.flatnonzero(shards.dates(rows) > after)
    days = shards.dates(rows[later])
    report: dict[str, Any] = {"windows": len(later), "days": len(np.unique(days)), "nll": None, "baselines": {}}
    if not len(later) or "sigma" not in saved.columns:
        return report
    parts = []
    for at in range(0, len(later), BATCH):
        windows, target = shards.gather(rows[later[at : at + BATCH]])
        parts.append({**saved.predict(windows.numpy()), "target": target.double().numpy()})
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    nu = columns.get("nu", np.full(len(later), np.inf))
    own = judge(Predictive(*map(torch.from_numpy, (columns["mu"], columns["sigma"], nu))), columns["target"])
    for name, forecast in baseline_forecasts(shards, "test").items():
        if forecast.sigma is not None:
            other = judge(predictive_of(_part(forecast, later)), columns["target"])
            report["baselines"][name] = {
                "nll": float(other["nll"].mean()),
                **gain(own, other, days, shards.spec.horizon),
            }
    return {**report, "nll": float(own["nll"].mean()), "first_date": str(days.min()), "last_date": str(days.max())}


def _part(forecast: Forecast, positions: Any) -> Forecast:
    assert forecast.sigma is not None
    return replace(forecast, mu=forecast.mu[positions], sigma=forecast.sigma[positions])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.reassess", description=__doc__.split("\n\n")[0])
    parser.add_argument("--run-dir", required=True, help="of the training that made the model")
    parser.add_argument("--dataset", required=True, help="folder of manifest.json: a path or any fsspec address")
    parser.add_argument("--after", required=True, type=np.datetime64, help="only days after this one, YYYY-MM-DD")
    options = parser.parse_args(arguments)
    from trainer.shards import DataShardManager

    torch.set_num_threads(1)
    try:
        storage = RunDir(options.run_dir).storage
        saved = load_saved_model(lambda name: storage.read(f"{FOLDER}/{name}"))
        report = reassess(saved, DataShardManager(options.dataset), options.after)
    except (ConfigError, SavedModelError, ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(report, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
