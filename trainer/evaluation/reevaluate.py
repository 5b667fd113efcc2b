"""Evaluate a trained model on later days: ``python -m trainer.evaluation.reevaluate --model FOLDER --dataset URI
--after DAY``.

The windows are those of a newer dataset's test split that end after a day. The baselines are evaluated on the same
windows, because a likelihood alone says little: some times are more volatile than others. The model itself, whose code
is not trusted, runs in a process of its own (`trainer.isolation.runner`).

The command prints one JSON line. Its exit code is 2 if the model cannot be evaluated on this dataset.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter

from trainer.config import ConfigError
from trainer.data.sampler import spread_positions
from trainer.evaluation.baselines import BaselineForecast, baseline_forecasts
from trainer.evaluation.report import gain, predictive_of, score_forecast
from trainer.isolation.runner import Isolated, IsolationError
from trainer.model.losses import Predictive
from trainer.model.saved_model import BATCH, DESCRIPTION
from trainer.spec import DataSpec

if TYPE_CHECKING:
    from trainer.data.shards import DataShardManager

ALIKE = ("window", "features", "target", "horizon")


class Forecaster(Protocol):
    """A trained model, wherever its code runs."""

    @property
    def spec(self) -> DataSpec:
        """The data that the model takes."""
        ...

    def predict(self, windows: NDArray[Any]) -> dict[str, NDArray[np.float64]]:
        """Return named columns (n,) for raw feature windows (n, W, F)."""
        ...


@dataclass(frozen=True, slots=True)
class FolderModel:
    """The model of a folder of `model.json` and `weights.pt`, asked in a process of its own."""

    spec: DataSpec
    isolated: Isolated

    def predict(self, windows: NDArray[Any]) -> dict[str, NDArray[np.float64]]:
        """Return named columns (n,) for raw feature windows (n, W, F), computed in the other process."""
        return self.isolated.predict(windows)


def open_folder(folder: Path, code: Path | None) -> FolderModel:
    """Return the model of a folder that the orchestrator wrote: its files and the modules that its factories may use
    (``factories.json``). ``code``: the folder of these modules."""
    description = json.loads((folder / DESCRIPTION).read_text())
    spec = TypeAdapter(DataSpec).validate_python(description["spec"])
    modules = tuple(json.loads((folder / "factories.json").read_text())["modules"])
    return FolderModel(spec, Isolated(folder=folder, modules=modules, path=(code,) if code else ()))


def reevaluate(saved: Forecaster, shards: DataShardManager, after: np.datetime64) -> dict[str, Any]:
    """Return the model's NLL on the windows that end after this day, and by how much it is lower than each baseline's.

    ``nll`` is None if there is no such window, or the model forecasts no distribution. Raise ValueError if the model
    takes other windows than these.
    """
    for name in ALIKE:
        own, its = getattr(saved.spec, name), getattr(shards.spec, name)
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
    windows = np.empty((len(later), shards.spec.window, len(shards.spec.features)), dtype=np.float32)
    targets = []
    for at in range(0, len(later), BATCH):
        part, target = shards.gather(rows[later[at : at + BATCH]])
        windows[at : at + BATCH] = part.numpy()
        targets.append(target.double().numpy())
    columns = {**saved.predict(windows), "target": np.concatenate(targets)}
    if "sigma" not in columns:
        return report
    nu = columns.get("nu", np.full(len(later), np.inf))
    own = score_forecast(Predictive(*map(torch.from_numpy, (columns["mu"], columns["sigma"], nu))), columns["target"])
    for name, forecast in baseline_forecasts(shards, "test").items():
        if forecast.sigma is not None:
            other = score_forecast(predictive_of(_part(forecast, later)), columns["target"])
            report["baselines"][name] = {
                "nll": float(other["nll"].mean()),
                **gain(own, other, days, shards.spec.horizon),
            }
    return {**report, "nll": float(own["nll"].mean()), "first_date": str(days.min()), "last_date": str(days.max())}


def _part(forecast: BaselineForecast, positions: Any) -> BaselineForecast:
    assert forecast.sigma is not None
    return replace(forecast, mu=forecast.mu[positions], sigma=forecast.sigma[positions])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 if the model cannot be judged."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.evaluation.reevaluate", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--model", required=True, type=Path, help="folder of model.json, weights.pt, factories.json")
    parser.add_argument("--code", type=Path, help="folder of the modules of its factories, where they are one's own")
    parser.add_argument("--dataset", required=True, help="folder of manifest.json: a path or any fsspec address")
    parser.add_argument("--after", required=True, type=np.datetime64, help="only days after this one, YYYY-MM-DD")
    options = parser.parse_args(arguments)
    from trainer.data.shards import DataShardManager

    torch.set_num_threads(1)
    try:
        saved = open_folder(options.model, options.code)
        report = reevaluate(saved, DataShardManager(options.dataset), options.after)
    except (ConfigError, IsolationError, ValueError, KeyError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(report, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
