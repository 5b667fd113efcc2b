"""The plan: what will be trained, on which nodes, for how long and how many dollars. Decided once, it flows as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dtrain_dagster.costs.estimate import Basis, Estimate, Work
from dtrain_dagster.costs.prices import Tier

STAND_IN, LISTED = "stand-in price, nothing was billed", "list price, not the bill"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """What `trained_checkpoint` carries out."""

    fingerprint: str
    """Of everything that decides what comes out, see `dtrain_dagster.jobs.progress.fingerprint`."""
    job: dict[str, Any]
    """The sections ``dataset``, ``model``, ``loss`` and ``training`` of the job's ``job.json``."""
    sku: str
    tier: Tier
    node_count: int
    processes_per_node: int
    work: Work
    estimate: Estimate
    basis: str
    """What the estimate rests on, in words."""
    price_note: str
    """Where the price comes from, and that nothing is billed where it stands in."""
    price_words: str = STAND_IN
    """The same in a few words, for behind a figure."""
    pace: str = ""
    """Of what decides how long a step takes, see `dtrain_dagster.planning.history.pace_mark`."""
    basis_kind: Basis = "probe"
    rests_on: tuple[str, ...] = ()
    """Ids of the jobs that the estimate rests on, probes or past runs; the one on as many nodes as planned first."""
    learned_factor: float = 1.0
    """What past estimates have taught, which is in the estimate."""
    budget_usd: float = 0.0
    """What the training may be expected to cost at most; 0: any sum."""
    deadline_hours: float = 0.0
    """How long it may be expected to take at most; 0: any time."""
    stop_at_usd: float = 0.0
    """At how many dollars it saves a checkpoint and stops; 0: never."""
    phases: dict[str, float] = field(default_factory=dict)
    """Expected seconds by phase, see `costs.estimate.Parts`; `planning.projection` takes them for what is to come."""


def parse_plan(document: Any, source: str) -> TrainingPlan:
    """The plan as ``plan.json`` has it. Fields that are not known are left out, and those that an older version did not
    write have their defaults. ValueError, which names ``source``, for what is no plan."""
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
