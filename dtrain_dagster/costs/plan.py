"""The plan: what will be trained, on which nodes, for how long and for how many dollars, decided once and passed on as
data; and its hard budget in node-seconds, the unit that the nodes keep (`trainer.engine.budget`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from dtrain_dagster.costs.estimate import Basis, Estimate, Work
from dtrain_dagster.costs.prices import STAND_IN, PriceError, price_of
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.settings.cluster_kinds import Tier, current_tier, tier_of
from trainer.rundir import LAUNCH, LIMIT, RunDir
from trainer.setting_errors import describe_errors

PLAN = "plan.json"
"""File of a run directory: the plan that the job carries out, for those who watch its cost."""
PLANNED_FOR = "asset"
"""The key in `PLAN` that names the asset which the job trains. Plans of older versions have none."""
STOCK_TRAINED = "trained_checkpoint"
LEAST_RAISE_SECONDS = 1.0
"""Node-seconds by which a spent budget must be raised to continue. Dollars become seconds again with an error of about
a microsecond, and no checkpoint and step fit into a second."""
SECTIONS = ("dataset", "model", "loss", "training")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeCharge:
    """A probe whose cost belongs to the plan that rests on it."""

    job_id: str
    usage: tuple[NodeUsage, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """The plan that `trained_checkpoint` carries out."""

    fingerprint: str
    """Digest of everything that decides the trained weights, see `dtrain_dagster.jobs.start.fingerprint`."""
    job: dict[str, Any]
    """The `SECTIONS` of ``job.json``; and where a script trains, ``script``, see `dtrain_dagster.jobs.script_job`."""
    sku: str
    tier: Annotated[Tier, BeforeValidator(current_tier)]
    """The tier; plans of before 2026-03-31 have the old name of Spot, which is read as Spot."""
    node_count: int
    processes_per_node: int
    work: Work
    estimate: Estimate
    basis: str
    price_note: str
    """The source of the price, and that nothing is billed where it is a stand-in."""
    price_words: str = STAND_IN
    """The same in a few words, for behind a figure."""
    pace: str = ""
    """Digest of everything that decides the duration of a step, see `dtrain_dagster.planning.build_plan.pace_mark`."""
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
    probes: tuple[ProbeCharge, ...] = ()
    """The probes that are paid with this training, and not by another one. ``estimate`` is without them."""

    @property
    def sections(self) -> dict[str, Any]:
        return {name: self.job[name] for name in SECTIONS if name in self.job}

    @property
    def command(self) -> tuple[str, ...] | None:
        """Return the command of the script that trains; None where the trainer does by itself."""
        script = self.job.get("script")
        return tuple(script["command"]) if script else None

    @property
    def probe_usd(self) -> float:
        """Return the dollars of its probes. Raise `PriceError` where a price is not known."""
        return CostTracker("", self.probe_usage, self.tier).total_usd

    @property
    def probe_usage(self) -> tuple[NodeUsage, ...]:
        return tuple(replace(item, is_probe=True) for probe in self.probes for item in probe.usage)


def charges_of(document: Mapping[str, Any] | None) -> tuple[ProbeCharge, ...]:
    """Return `TrainingPlan.probes` of a ``plan.json``. Raise ValueError where they cannot be read."""
    try:
        return _adapter(tuple[ProbeCharge, ...]).validate_python((document or {}).get("probes") or ())
    except (ValidationError, AttributeError) as error:
        raise ValueError(f"{PLAN} names probes that cannot be read: {error}") from None


def probe_usage_of(document: Mapping[str, Any] | None) -> tuple[NodeUsage, ...]:
    """Return `TrainingPlan.probe_usage` of a ``plan.json``; raise as `charges_of`."""
    return tuple(replace(item, is_probe=True) for probe in charges_of(document) for item in probe.usage)


def parse_plan(document: Any, source: str) -> TrainingPlan:
    """Return the plan of a ``plan.json``. Unknown fields are left out, and those that an older version did not write
    have their defaults. Raise ValueError, which names ``source``, where it is no plan."""
    try:
        return _adapter(TrainingPlan).validate_python(document)
    except ValidationError as error:
        wrong = describe_errors(error, TrainingPlan).replace("\n", "; ")
        raise ValueError(
            f"{source} holds no plan: {wrong}. Without that file, the plan of cost_estimate applies"
        ) from None


_adapter = cache(TypeAdapter)


def node_seconds_of(stop_at_usd: float, usage: Iterable[NodeUsage], sku: str, tier: Tier) -> float:
    """Return how many node-seconds a job may be paid in all until its dollars are spent: those paid so far, on any
    nodes, and those that the rest of the dollars buys at the price of the nodes that it continues with. Pure. Its
    probes cost dollars, but none of the seconds that its nodes count. ``tier``: also of intervals that do not name
    theirs. Raise `PriceError` where a price is not known."""
    intervals = list(usage)
    mine = [item for item in intervals if not item.is_probe]
    seconds = sum(max(0.0, item.ended_at - item.started_at) for item in mine)  # as the nodes count them
    left_usd = max(0.0, stop_at_usd - CostTracker("", intervals, tier).total_usd)
    return seconds + left_usd / price_of(sku).usd_per_hour(tier) * 3600


def is_spent(limit: float, paid: float, stopped_at: float | None) -> bool:
    """Return whether a job has no budget left to continue with. Pure. ``limit``, ``paid``: the node-seconds that it may
    be paid in all and that it was paid. ``stopped_at``: the budget at which its last launch stopped, if it did. Such a
    job has kept back what a checkpoint takes, so it was paid less than that budget, and yet no step fits into it."""
    return paid >= limit or (stopped_at is not None and limit < stopped_at + LEAST_RAISE_SECONDS)


def write_limit(rundir: RunDir, max_node_seconds: float | None, stop_at_usd: float | None = None) -> None:
    """Set the budget of a job, running or not: its nodes read it within a minute, and before they stop for it. None: no
    budget. ``stop_at_usd``: the dollars it was computed from, for a later launch at another price."""
    if max_node_seconds is None and not rundir.storage.exists(LIMIT):
        return
    rundir.write_json(LIMIT, {"max_node_seconds": max_node_seconds, "stop_at_usd": stop_at_usd or None})


def launch_price(rundir: RunDir, tier: Tier) -> float | None:
    """Return what a node of a job's last launch costs in an hour; None where that is not known."""
    launch = rundir.read_json(LAUNCH) or {}
    try:
        return price_of(launch["sku"]).usd_per_hour(tier_of(launch.get("tier") or tier)) if "sku" in launch else None
    except PriceError:
        return None


def reprice(rundir: RunDir, usage: Iterable[NodeUsage], sku: str, tier: Tier) -> None:
    """Recompute a budget in dollars for a job that continues on these nodes. Raise `PriceError`."""
    dollars = (rundir.read_json(LIMIT) or {}).get("stop_at_usd")
    if dollars:
        paid = [*usage, *probe_usage_of(rundir.read_json(PLAN))]
        write_limit(rundir, node_seconds_of(dollars, paid, sku, tier), dollars)
