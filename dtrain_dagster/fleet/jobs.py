"""The nouns of a fleet: its jobs, its limits, and how a job stands. Plain data, without clock or storage.

Money is in the whole units of `dtrain_dagster.costs.money`, so that sums of promises and bills are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

from dtrain_dagster.costs.money import SECOND, USD, nano_usd, usd
from trainer.config import JOB_ID, JobConfig
from trainer.rundir import RunDir

MEASURED_SPREAD = 0.1
"""Standard deviation of the work left, as a fraction of it, once a job tells its speed."""


class FleetError(ValueError):
    """Something about a fleet cannot be used. The message names the field and the remedy."""


class FleetState(StrEnum):
    """The state of a job in a fleet."""

    WAITING = "waiting"
    """Never started."""
    RUNNING = "running"
    """It may have nodes: it was ordered, and its launch is not known to have ended."""
    PAUSING = "pausing"
    """It has nodes, and was asked to save a checkpoint and to leave them."""
    ENDING = "ending"
    """The same, and it will not be continued."""
    PAUSED = "paused"
    """It has no nodes, and is continued from its latest checkpoint."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ENDED = "ended"
    """It was ended, or never begun, by a decision."""

    @property
    def is_final(self) -> bool:
        """Return whether the job is over."""
        return self in (FleetState.SUCCEEDED, FleetState.FAILED, FleetState.ENDED)

    @property
    def has_nodes(self) -> bool:
        """Return whether nodes may be paid for now."""
        return self in (FleetState.RUNNING, FleetState.PAUSING, FleetState.ENDING)


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetJob:
    """One job of a fleet, as its source describes it. It is not changed after it was given."""

    job_id: str
    priority: int = 0
    """Of two jobs that wait, the higher one comes first."""
    nodes: int = 1
    node_seconds: float
    """Paid seconds expected on all its nodes, from the first step to the end, without starts."""
    spread: float = 0.3
    """Standard deviation of `node_seconds` as a fraction of it."""
    startup_seconds: float = 20.0
    """Seconds from the start of a launch to its first step, on each node; paid again at each continuation."""
    deadline: float | None = None
    """Unix time by which it must have ended; None: that of the fleet."""
    config: JobConfig | None = None
    """What is trained: ``run_dir`` is the folder in which the cluster keeps it, ``training.world_size`` the ranks for
    which its batches were planned; its budget is the fleet's matter. None in a simulation, and with a `problem`."""
    command: tuple[str, ...] | None = None
    """The command of a script that trains it; None for ``python -m trainer``."""
    problem: str = ""
    """Why it cannot be trained: then it has failed as soon as it is given."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What its source has to know of it later on; plain data."""

    def __post_init__(self) -> None:
        if not JOB_ID.fullmatch(self.job_id):
            words = "job_id has letters, digits, dots, dashes and underscores, at most 200, a letter or digit first"
            raise FleetError(f"job {self.job_id!r}: {words}")
        for name, least in (("nodes", 1), ("node_seconds", 1e-9), ("spread", 0), ("startup_seconds", 0)):
            if not least <= (value := getattr(self, name)) < math.inf:
                raise FleetError(f"job {self.job_id!r}: {name} is {value}, not {least} or more")

    @property
    def trained(self) -> JobConfig:
        """Return what is trained. Raise `FleetError` where that is not known."""
        if self.config is None:
            raise FleetError(f"job {self.job_id!r} has no config: it can be simulated, but not run")
        return self.config

    @property
    def rundir(self) -> RunDir:
        """Return the run directory of the job."""
        return RunDir(self.trained.run_dir)

    @property
    def paid_seconds(self) -> float:
        """Return the node-seconds that are paid for the whole work, with a start."""
        return self.nodes * self.startup_seconds + self.node_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLimits:
    """What a fleet may take."""

    budget_usd: float
    """Dollars that all nodes of all its jobs may cost together."""
    nodes: int
    """Nodes that its jobs may have at once."""
    usd_per_node_hour: float
    """Price of one node, the dearest that may be bought."""
    deadline: float | None = None
    """Unix time by which all must have ended; None: any."""
    margin_seconds: float = 30.0
    """Seconds for which each node of a job may be paid after the job has come to its limit. A node notices it within
    one; one that has only just been started in place of another first has to get so far that it can."""

    def __post_init__(self) -> None:
        for name in ("budget_usd", "nodes", "usd_per_node_hour", "margin_seconds"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise FleetError(f"{name} is {value}, not above 0")

    @property
    def budget_units(self) -> int:
        """Return the budget in the units of `dtrain_dagster.costs.money`."""
        return int(self.budget_usd * 10**9) * (USD // 10**9)

    def units_of(self, node_seconds: float) -> int:
        """Return what this many node-seconds cost."""
        return round(node_seconds * SECOND) * _nano_usd(self.usd_per_node_hour)

    def seconds_of(self, units: int) -> float:
        """Return how many node-seconds an amount pays for, rounded down to a microsecond."""
        return units // _nano_usd(self.usd_per_node_hour) / SECOND


_nano_usd = lru_cache(16)(nano_usd)
"""The price of a fleet is one, and decisions ask for it very often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How one job of a fleet stands at one moment: what is remembered of it, and what decisions are made from."""

    job: FleetJob
    number: int
    """Its place in the order in which the source gave them."""
    state: FleetState = FleetState.WAITING
    reason: str = ""
    """Why it failed, was ended, was never begun, or leaves its nodes."""
    nodes: int = 0
    """Nodes of its present launch; 0 without one."""
    paid_units: int = 0
    """What its nodes have cost in all launches, as far as it is known."""
    node_seconds: float = 0.0
    """The seconds of that bill."""
    grant_units: int = 0
    """What they may have cost in all. Without a launch: what it has paid."""
    launches: int = 0
    """How often it was given nodes."""
    before: str = ""
    """The launch that its run directory held when it was last given nodes: while it is the same, nothing was started
    yet."""
    launched_at: float | None = None
    """Unix time at which it was given its nodes last; None: never."""
    not_before: float = 0.0
    """Unix time before which it is not started: no nodes were to be had."""
    failures: int = 0
    """Launches in a row that ended without a result of their own."""
    left_node_seconds: float | None = None
    """Paid seconds of all its nodes that are expected until its end; None: all of them."""
    is_training: bool = False
    """Whether its present launch has come to its first step."""

    @property
    def job_id(self) -> str:
        """Return the id of the job."""
        return self.job.job_id

    @property
    def usd(self) -> float:
        """Return what its nodes have cost, in dollars."""
        return usd(self.paid_units)

    @property
    def left(self) -> float:
        """Return the expected work that is left, as paid seconds of all its nodes."""
        return self.job.node_seconds if self.left_node_seconds is None else self.left_node_seconds

    @property
    def spread(self) -> float:
        """Return the standard deviation of `left` as a fraction of it."""
        return self.job.spread if self.left_node_seconds is None else MEASURED_SPREAD

    @property
    def is_begun(self) -> bool:
        """Return whether anything was ever paid for it."""
        return self.launched_at is not None

    @property
    def verb(self) -> str:
        """Return what happens to it when it is given nodes, in a word."""
        return "continued" if self.is_begun else "begun"

    def deadline(self, limits: FleetLimits) -> float:
        """Return the Unix time by which it must have ended."""
        return min((at for at in (self.job.deadline, limits.deadline) if at is not None), default=math.inf)

    def seconds_left(self, deviations: float = 0.0) -> float:
        """Return the seconds to its end on its nodes, with a start unless it trains on them already. ``deviations``:
        standard deviations of the work that are added."""
        work = self.left * max(0.0, 1 + deviations * self.spread)
        return (0.0 if self.is_training else self.job.startup_seconds) + work / self.job.nodes
