"""What must hold after a run of `benchmarks.azure_faults`, what was lost where it does not, and the counts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.azure_faults_scripts import Script

ENDED, GONE = ("Completed", "Failed", "Canceled"), ("leaving", "preempted", "unusable")
SETTLE_SECONDS = 30.0
"""Longest time from the end of a job for its owner to the end of its nodes in the service."""
SLACK_MINUTES = 0.1
"""Minutes by which a node may be counted longer than it was bought: two clocks, and looks at intervals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What is known of a run that is over, with its faults cleared. Times are those of the emulator's clock."""

    outcome: str
    """succeeded, failed, cancelled, no_capacity, refused, never_ended."""
    message: str
    may_end: Collection[str]
    """Outcomes that its script may have."""
    steps: int
    """Steps that a successful run had to do."""
    result: Mapping[str, Any]
    launch: int
    """Number of the last launch that was asked for; 0: none."""
    job_id: str
    nodes: int
    jobs: Mapping[str, str]
    """Jobs of the run in the service → their state, after `SETTLE_SECONDS` at most."""
    failed_computes: Sequence[str]
    live_nodes: int
    """Nodes of the run after the idle time."""
    left_computes: Sequence[str]
    """Computes of the run after it was cleaned up."""
    ended_at: float
    """When the job had ended for its owner."""
    released_at: float
    """Until when its idle nodes may stay."""
    stays: Sequence[Mapping[str, Any]]
    """Stays of nodes on the run's computes, as the emulator's control port gives them."""
    now: float
    counted_minutes: float
    """Node-minutes of the job by our own count."""
    prices: Mapping[tuple[str, str], float]
    """Size and tier → US dollars per hour."""
    troubles: Sequence[str] = ()
    """Errors where none may be: of cancelling what has ended, of the last cleaning."""


def orphan_minutes(facts: RunFacts) -> float:
    """Return the node-minutes of the run's jobs after the job had ended for its owner."""
    return sum(minutes for minutes, _ in _orphans(facts))


def lost_usd(facts: RunFacts) -> float:
    """Return the dollars for nodes that worked on after the job's end, beyond what settling takes, and for those that
    stayed after the idle time."""
    lost = sum(minutes / 60 * price for minutes, price in _orphans(facts)) if _is_orphaned(facts) else 0.0
    for stay in facts.stays:
        over = (_end(stay["end"], facts) - max(stay["start"], facts.released_at)) / 3600
        lost += max(0.0, over) * facts.prices.get((stay["vm_size"], stay["tier"]), 0.0)
    return lost


def bought_minutes(facts: RunFacts) -> float:
    """Return the node-minutes that the run's jobs had of the service."""
    return sum((_end(end, facts) - start) / 60 for _, _, start, end in _works(facts))


def _ends(facts: RunFacts) -> str:
    return facts.message or "without a word" if facts.outcome == "never_ended" else ""


def _says_why(facts: RunFacts) -> str:
    silent = facts.outcome not in ("succeeded", "cancelled") and not facts.message
    return f"it {facts.outcome} without a word" if silent else ""


def _outlives_what_passes(facts: RunFacts) -> str:
    justified = facts.outcome == "never_ended" or facts.outcome in facts.may_end
    return "" if justified else f"it {facts.outcome}, and its faults may only have led to {sorted(facts.may_end)}"


def _trains(facts: RunFacts) -> str:
    done = facts.result.get("steps") == facts.steps and bool(facts.result.get("weights_equal_on_ranks"))
    return f"it succeeded with {dict(facts.result)}" if facts.outcome == "succeeded" and not done else ""


def _buys_what_was_asked(facts: RunFacts) -> str:
    bought, asked = set(facts.jobs), {f"{facts.job_id}-l{number}" for number in range(1, facts.launch + 1)}
    if facts.outcome in ("no_capacity", "refused") and bought:
        return f"{facts.outcome}, but bought were {sorted(bought)}"
    return f"{facts.launch} launches were asked for, bought were {sorted(bought)}" if not bought <= asked else ""


def _leaves_no_orphans(facts: RunFacts) -> str:
    return f"nodes worked on for {orphan_minutes(facts):.2f} minutes after the end" if _is_orphaned(facts) else ""


def _leaves_no_job(facts: RunFacts) -> str:
    alive = sorted(name for name, state in facts.jobs.items() if state not in ENDED)
    return f"still alive: {alive}" if alive else ""


def _leaves_no_failed_compute(facts: RunFacts) -> str:
    return f"left Failed: {list(facts.failed_computes)}" if facts.failed_computes else ""


def _gives_nodes_back(facts: RunFacts) -> str:
    return f"{facts.live_nodes} nodes alive after the idle time" if facts.live_nodes else ""


def _cleans_up(facts: RunFacts) -> str:
    return f"not cleaned up: {list(facts.left_computes)}" if facts.left_computes else ""


def _counts_no_more_than_was_bought(facts: RunFacts) -> str:
    bought = bought_minutes(facts)
    over = facts.counted_minutes - bought > SLACK_MINUTES * max(1, len(facts.jobs)) * facts.nodes
    return f"{facts.counted_minutes:.2f} node-minutes counted, {bought:.2f} bought" if over else ""


def _keeps_calm(facts: RunFacts) -> str:
    return "; ".join(facts.troubles)


INVARIANTS: dict[str, Callable[[RunFacts], str]] = {
    "ends": _ends,
    "says_why": _says_why,
    "outlives_what_passes": _outlives_what_passes,
    "trains": _trains,
    "buys_what_was_asked": _buys_what_was_asked,
    "leaves_no_orphans": _leaves_no_orphans,
    "leaves_no_job": _leaves_no_job,
    "leaves_no_failed_compute": _leaves_no_failed_compute,
    "gives_nodes_back": _gives_nodes_back,
    "cleans_up": _cleans_up,
    "counts_no_more_than_was_bought": _counts_no_more_than_was_bought,
    "keeps_calm": _keeps_calm,
}
"""Name → a function that returns how a run violates it; "" where it does not."""


def find_violations(facts: RunFacts) -> dict[str, str]:
    """Return the violated invariants of a run, with what was seen."""
    return {name: said for name, check in INVARIANTS.items() if (said := check(facts))}


def _works(facts: RunFacts) -> list[tuple[Mapping[str, Any], str, float, float | None]]:
    """Return the work of nodes for the run's jobs: stay, job, start and end."""
    return [
        (stay, name, start, end)
        for stay in facts.stays
        for name, start, end in stay["jobs"]
        if name.startswith(f"{facts.job_id}-l")
    ]


def _orphans(facts: RunFacts) -> list[tuple[float, float]]:
    """Return minutes and price per hour of work after the job's end."""
    return [
        (
            max(0.0, _end(end, facts) - max(start, facts.ended_at)) / 60,
            facts.prices.get((stay["vm_size"], stay["tier"]), 0.0),
        )
        for stay, _, start, end in _works(facts)
    ]


def _is_orphaned(facts: RunFacts) -> bool:
    return orphan_minutes(facts) > SETTLE_SECONDS / 60 * facts.nodes


def _end(end: float | None, facts: RunFacts) -> float:
    return facts.now if end is None else end


@dataclass
class Campaign:
    """The counts of all runs so far, and the violations by seed."""

    runs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    invariants: Counter[str] = field(default_factory=Counter)
    lifted: int = 0
    launches: int = 0
    orphan_minutes: float = 0.0
    lost_usd: float = 0.0
    left_alive: int = 0
    left_failed: int = 0
    failed: list[int] = field(default_factory=list)

    def add(self, seed: int, script: Script, lifted: bool, facts: RunFacts, wrong: Mapping[str, str]) -> None:
        """Count a run that is over. ``lifted``: it ended only after its faults were cleared."""
        self.runs += 1
        self.outcomes[facts.outcome] += 1
        self.faults.update(fault.name for fault in script.faults)
        happened = {
            "death": script.dies_after is not None,
            "cancel": script.cancels_after is not None,
            "cancel again": script.cancels_ended,
        }
        self.faults.update(name for name, did in happened.items() if did)
        self.invariants.update(wrong.keys())
        self.lifted += lifted
        self.launches += len(facts.jobs)
        self.orphan_minutes += orphan_minutes(facts) if "leaves_no_orphans" in wrong else 0.0
        self.lost_usd += lost_usd(facts)
        self.left_alive += facts.live_nodes
        self.left_failed += len(facts.failed_computes)
        if wrong:
            self.failed.append(seed)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts for the benchmark's line."""
        return {
            "runs": self.runs,
            "violations": len(self.failed),
            "failed_seeds": sorted(self.failed),
            "invariants": {name: self.invariants[name] for name in INVARIANTS},
            "outcomes": dict(sorted(self.outcomes.items())),
            "faults": dict(sorted(self.faults.items())),
            "lifted": self.lifted,
            "launches": self.launches,
            "orphan_node_minutes": round(self.orphan_minutes, 3),
            "lost_usd": round(self.lost_usd, 4),
            "left_alive": self.left_alive,
            "left_failed": self.left_failed,
        }
