"""What must hold after a run of `benchmarks.azure_faults`, what was lost where it does not, and the counts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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


def judge(facts: RunFacts) -> dict[str, str]:
    """Return each invariant with what was seen of the run that violates it; "" where it holds."""
    outcome, message = facts.outcome, facts.message
    bought, asked = set(facts.jobs), {f"{facts.job_id}-l{number}" for number in range(1, facts.launch + 1)}
    unasked = not bought <= asked or (bool(bought) and outcome in ("no_capacity", "refused"))
    trained = facts.result.get("steps") == facts.steps and bool(facts.result.get("weights_equal_on_ranks"))
    alive = sorted(name for name, state in facts.jobs.items() if state not in ENDED)
    minutes = bought_minutes(facts)
    over = facts.counted_minutes - minutes > SLACK_MINUTES * max(1, len(facts.jobs)) * facts.nodes
    ended = outcome != "never_ended"
    orphaned = orphan_minutes(facts)
    found: dict[str, tuple[bool, str]] = {
        "ends": (not ended, message or "without a word"),
        "says_why": (outcome not in ("succeeded", "cancelled") and not message, f"it {outcome} without a word"),
        "outlives_what_passes": (
            ended and outcome not in facts.may_end,
            f"it {outcome}, and its faults may only have led to {sorted(facts.may_end)}",
        ),
        "trains": (outcome == "succeeded" and not trained, f"it succeeded with {dict(facts.result)}"),
        "buys_what_was_asked": (
            unasked,
            f"it {outcome}, {facts.launch} launches were asked for, bought: {sorted(bought)}",
        ),
        "leaves_no_orphans": (_is_orphaned(facts), f"nodes worked on for {orphaned:.2f} minutes after the end"),
        "leaves_no_job": (bool(alive), f"still alive: {alive}"),
        "leaves_no_failed_compute": (bool(facts.failed_computes), f"left Failed: {list(facts.failed_computes)}"),
        "gives_nodes_back": (facts.live_nodes > 0, f"{facts.live_nodes} nodes alive after the idle time"),
        "cleans_up": (bool(facts.left_computes), f"not cleaned up: {list(facts.left_computes)}"),
        "counts_no_more_than_was_bought": (
            over,
            f"{facts.counted_minutes:.2f} node-minutes counted, {minutes:.2f} bought",
        ),
        "keeps_calm": (bool(facts.troubles), "; ".join(facts.troubles)),
    }
    return {name: said if is_violated else "" for name, (is_violated, said) in found.items()}


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

    def add(self, seed: int, script: Script, lifted: bool, facts: RunFacts) -> dict[str, str]:
        """Count a run that is over, and return what it violated, with what was seen. ``lifted``: it ended only after
        its faults were cleared."""
        judged = judge(facts)
        self.runs += 1
        self.outcomes[facts.outcome] += 1
        self.faults.update(fault.name for fault in script.faults)
        self.faults.update({"death": script.dies_after is not None, "cancel": script.cancels_after is not None})
        self.faults.update({"cancel again": script.cancels_ended})
        self.invariants.update({name: bool(said) for name, said in judged.items()})
        self.lifted += lifted
        self.launches += len(facts.jobs)
        self.orphan_minutes += orphan_minutes(facts) if judged["leaves_no_orphans"] else 0.0
        self.lost_usd += lost_usd(facts)
        self.left_alive += facts.live_nodes
        self.left_failed += len(facts.failed_computes)
        wrong = {name: said for name, said in judged.items() if said}
        self.failed += [seed] if wrong else []
        return wrong

    def as_dict(self) -> dict[str, Any]:
        """Return the counts for the benchmark's line."""
        return {
            "runs": self.runs,
            "violations": len(self.failed),
            "failed_seeds": sorted(self.failed),
            "invariants": dict(self.invariants),
            "outcomes": dict(sorted(self.outcomes.items())),
            "faults": {name: count for name, count in sorted(self.faults.items()) if count},
            "lifted": self.lifted,
            "launches": self.launches,
            "orphan_node_minutes": round(self.orphan_minutes, 3),
            "lost_usd": round(self.lost_usd, 4),
            "left_alive": self.left_alive,
            "left_failed": self.left_failed,
        }
