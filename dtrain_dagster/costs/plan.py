"""The plan: what will be trained, on which nodes, for how long and for how many dollars. It is decided once and then
passed on as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dtrain_dagster.costs.estimate import Basis, Estimate, Work
from dtrain_dagster.costs.prices import STAND_IN, Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """The plan that `trained_checkpoint` carries out."""

    fingerprint: str
    """Digest of everything that decides the trained weights, see `dtrain_dagster.jobs.progress.fingerprint`."""
    job: dict[str, Any]
    """The sections ``dataset``, ``model``, ``loss`` and ``training`` of the job's ``job.json``."""
    sku: str
    tier: Tier
    node_count: int
    processes_per_node: int
    work: Work
    estimate: Estimate
    basis: str
    """The basis of the estimate, in words."""
    price_note: str
    """The source of the price, and that nothing is billed where it is a stand-in."""
    price_words: str = STAND_IN
    """The same in a few words, for behind a figure."""
    pace: str = ""
    """Digest of everything that decides the duration of a step, see `dtrain_dagster.planning.history.pace_mark`."""
    basis_kind: Basis = "probe"
    rests_on: tuple[str, ...] = ()
    """Ids of the jobs that the estimate rests on, probes or past runs; the one on as many nodes as planned first."""
    learned_factor: float = 1.0
    """Correction from past estimates; the estimate contains it."""
    budget_usd: float = 0.0
    """Largest expected cost in dollars that the plan allows; 0: any."""
    deadline_hours: float = 0.0
    """Largest expected duration in hours that the plan allows; 0: any."""
    stop_at_usd: float = 0.0
    """Dollars at which it saves a checkpoint and stops; 0: never."""
    phases: dict[str, float] = field(default_factory=dict)
    """Expected seconds by phase, see `costs.estimate.Parts`; `planning.projection` takes them for what is to come."""


def parse_plan(document: Any, source: str) -> TrainingPlan:
    """Return the plan of a ``plan.json``. Unknown fields are left out, and those that an older version did not write
    have their defaults. Raise ValueError, which names ``source``, where it is no plan."""
    try:
        return _adapter().validate_python(document)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ValueError(
            f"{source} holds no plan: {wrong}. Without that file the plan of cost_estimate counts"
        ) from None


@cache
def _adapter() -> TypeAdapter[TrainingPlan]:
    return TypeAdapter(TrainingPlan)
