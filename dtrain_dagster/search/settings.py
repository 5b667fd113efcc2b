"""What a search is asked for, besides its space and the job that it varies. Plain data, checked as it is made."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from dtrain_dagster.search.space import SpaceError

LOSS = "loss"
MOST_TRIALS = 10_000


class Sampler(StrEnum):
    """How values are drawn. Launchpads show the names."""

    gp = "gp"
    """Where the best score is expected to improve the most, by Optuna's Gaussian process."""
    random = "random"
    """Each evenly from its range."""


class Pruner(StrEnum):
    """What ends trials early."""

    asha = "asha"
    """Asynchronous successive halving: after 1, 3, 9, … evaluations the best third goes on."""
    none = "none"
    """Every trial goes to its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSettings:
    """How a search draws and judges its trials."""

    trials: int = 32
    """The largest number of trials."""
    parallel: int = 2
    """Trials that may run at once. Trial n knows exactly the trials up to n - ``parallel``, and waits for them to end:
    so the same seed gives the same trials, however long each takes."""
    sampler: Sampler = Sampler.gp
    pruner: Pruner = Pruner.asha
    seed: int = 0
    metric: str = LOSS
    """``loss`` of the validation split, or the name of a metric that the task measures there, such as ``accuracy``."""
    maximise: bool = False
    """Whether more of the metric is better."""

    def __post_init__(self) -> None:
        if not 1 <= self.trials <= MOST_TRIALS:
            raise SpaceError(f"trials = {self.trials}: a search has from 1 to {MOST_TRIALS:,} trials")
        if self.parallel < 1:
            raise SpaceError(f"parallel = {self.parallel}: at least one trial has to run")
        if self.seed < 0:
            raise SpaceError(f"seed = {self.seed}: seeds are 0 or more")

    @property
    def sign(self) -> float:
        """Return 1 where the metric is minimised, else -1."""
        return -1.0 if self.maximise else 1.0

    def decisive(self) -> dict[str, Any]:
        """Return what decides which trials the search has. More ``trials`` only continue it."""
        return {name: value for name, value in asdict(self).items() if name != "trials"}
