"""Play 2,000 jobs through a fleet's decisions, and through first-come-first-served at equal budget and nodes.

Run `python -m benchmarks.fleet`. Nothing is trained: `benchmarks.fleet_simulation` moves the jobs in virtual time,
and `dtrain_dagster.fleet.scheduling.decide` decides as it does for real ones. Jobs come over 24 hours, of random sizes,
priorities and nodes; what was expected of them is wrong by a factor (log-normal, sigma 0.5), one in twelve fails,
nodes are lost, and the orchestrator is dead twice for an hour. The budget pays for 60 % of the work.

First-come-first-served gives each job its nodes in order of arrival. It promises no dollars; instead all its nodes stop
at the very moment at which the last dollar is spent, and it is never dead: both in its favour.

    overspent_usd               dollars above the budget, the largest of all seeds; it must be 0
    granted_share               the largest sum of all grants at any moment, as a share of the budget
    used_share                  dollars used, as a share of the budget
    idle_share                  share of the nodes' time without a job, until the last job was over
    weighted_work               work of jobs that succeeded, each weighted with its priority (1 to 4), as a share of all
    completion_hours            mean hours from arrival to success, of the jobs that succeeded under both
    fcfs_…                      the same of first-come-first-served
    weighted_work_vs_fcfs       ratio, with the interval of 90 % over seeds
    completion_vs_fcfs          ratio of the mean completion times, likewise
"""

from __future__ import annotations

import math
import os
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.fleet_simulation import Played, SimulatedJob, Surroundings, play
from benchmarks.host import options_of, tell
from dtrain_dagster.costs.estimate import CONFIDENCE_90
from dtrain_dagster.fleet.jobs import FleetJob, FleetLimits, FleetState, Standing
from dtrain_dagster.fleet.scheduling import Decision

PRICE = 3.06
JOBS, NODES = 2000, 96
BUDGET_SHARE = 0.6
ARRIVE_SECONDS = 24 * 3600.0
AWAY = ((6 * 3600.0, 7 * 3600.0), (15 * 3600.0, 16 * 3600.0))


def make_jobs(seed: int) -> list[SimulatedJob]:
    """Return random jobs, the same for a seed."""
    chance = random.Random(seed)
    found = []
    for number in range(JOBS):
        expected = math.exp(chance.gauss(math.log(3600.0), 1.0))
        job = FleetJob(
            job_id=f"j{number}",
            priority=chance.choice((1, 1, 1, 2, 2, 3, 4)),
            nodes=chance.choice((1, 1, 1, 2, 4)) * chance.choice((1, 2, 4)),
            node_seconds=expected,
            spread=0.5,
            startup_seconds=chance.uniform(10, 90),
        )
        found.append(
            SimulatedJob(
                job=job,
                arrives_at=chance.uniform(0, ARRIVE_SECONDS),
                node_seconds=expected * math.exp(chance.gauss(0, 0.5)),
                fails_at=chance.random() if chance.random() < 1 / 12 else None,
                losses_per_node_hour=0.05,
            )
        )
    return found


def first_come(
    limits: FleetLimits, jobs: Sequence[Standing], now: float, more_may_come: bool, settled_units: int
) -> Sequence[Decision]:
    """Decide in order of arrival, until the budget is spent."""
    resting = [item for item in jobs if not item.state.has_nodes]
    spent = settled_units + sum(item.paid_units for item in jobs)
    if limits.seconds_of(max(0, limits.budget_units - spent)) < 1e-3:
        return [Decision(job_id=item.job_id, kind="end", reason="the budget is spent") for item in resting]
    free = limits.nodes - sum(item.nodes for item in jobs)
    found: list[Decision] = []
    for item in sorted(resting, key=lambda item: item.number):
        if item.job.nodes > free:
            break
        free -= item.job.nodes
        found.append(Decision(job_id=item.job_id, kind="start", grant_units=limits.budget_units))
    return found


def weighted_work(played: Played, jobs: Sequence[SimulatedJob]) -> float:
    """Return the work of the jobs that succeeded, weighted with their priority, as a share of all."""
    weight = {item.job.job_id: item.job.priority * item.node_seconds for item in jobs}
    done = sum(weight[end.job_id] for end in played.ends if end.state is FleetState.SUCCEEDED)
    return done / sum(weight.values())


def completion_hours(played: Played, jobs: Sequence[SimulatedJob], of: set[str]) -> float:
    """Return the mean hours from arrival to success of these jobs."""
    arrived = {item.job.job_id: item.arrives_at for item in jobs}
    return statistics.fmean((end.ended_at - arrived[end.job_id]) / 3600 for end in played.ends if end.job_id in of)


def succeeded(played: Played) -> set[str]:
    """Return the ids of the jobs that succeeded."""
    return {end.job_id for end in played.ends if end.state is FleetState.SUCCEEDED}


def interval(values: Sequence[float]) -> list[float]:
    """Return the mean of these values, one per seed, and the ends of its interval of 90 %."""
    middle = statistics.fmean(values)
    half = CONFIDENCE_90 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return [round(value, 4) for value in (middle, middle - half, middle + half)]


def measure_seed(seed: int) -> dict[str, float]:
    """Return the figures of one seed."""
    jobs = make_jobs(seed)
    budget = BUDGET_SHARE * PRICE * sum(item.node_seconds for item in jobs) / 3600
    limits = FleetLimits(budget_usd=budget, nodes=NODES, usd_per_node_hour=PRICE)
    ours = play(jobs, limits, Surroundings(seed=seed, away=AWAY))
    perfect = Surroundings(seed=seed, stops_at_budget=True)
    theirs = play(jobs, limits, perfect, first_come)
    both = succeeded(ours) & succeeded(theirs)
    found = {
        "overspent_usd": ours.overspent_usd,
        "granted_share": ours.most_granted_usd / budget,
        "used_share": ours.used_usd / budget,
        "idle_share": ours.idle_share,
        "weighted_work": weighted_work(ours, jobs),
        "succeeded": len(succeeded(ours)),
        "completion_hours": completion_hours(ours, jobs, both),
        "fcfs_used_share": theirs.used_usd / budget,
        "fcfs_idle_share": theirs.idle_share,
        "fcfs_weighted_work": weighted_work(theirs, jobs),
        "fcfs_succeeded": len(succeeded(theirs)),
        "fcfs_completion_hours": completion_hours(theirs, jobs, both),
    }
    return found | {
        "weighted_work_vs_fcfs": found["weighted_work"] / found["fcfs_weighted_work"],
        "completion_vs_fcfs": found["completion_hours"] / found["fcfs_completion_hours"],
    }


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = options_of("fleet", __doc__)
    parser.add_argument("--seeds", type=int, default=5, help="sets of random jobs (5)")
    options = parser.parse_args()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(measure_seed, range(options.seeds)))
    line: dict[str, Any] = {
        "metric": "overspent_usd",
        "value": max(row["overspent_usd"] for row in rows),
        "jobs": JOBS,
        "nodes": NODES,
        "seeds": options.seeds,
        **{name: interval([row[name] for row in rows]) for name in rows[0] if name != "overspent_usd"},
    }
    line["granted_share"] = max(row["granted_share"] for row in rows)
    tell("fleet", line, options.save)


if __name__ == "__main__":
    main()
