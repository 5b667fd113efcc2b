"""A short run of the planned training on the planned cluster: the basis of the estimate, and a rehearsal; and its cost:
what is expected before it is bought, what it has cost, and which training pays for it.

The probe goes through all that the training will go through (data, model, steps, evaluation, checkpoint, report), so a
model that raises or a disk that is full shows here, before the training is paid for.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from dtrain_dagster.clusters.base import ClusterError, GPUClusterManager, JobState
from dtrain_dagster.costs.estimate import CONFIDENCE_90, Forecast, Interval, LearnedCorrection, Sizes
from dtrain_dagster.costs.plan import ProbeCharge, node_seconds_of
from dtrain_dagster.costs.prices import SkuPrice
from dtrain_dagster.costs.tracker import CostTracker, paid_wall_seconds
from dtrain_dagster.jobs.progress import BudgetSpentError, WaitNews, follow_job, ran_out, start_job
from dtrain_dagster.planning.build_plan import Limits, PlannedJob
from dtrain_dagster.planning.measured import read_measured
from dtrain_dagster.settings.tiers import Tier
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.config import JobConfig, TrackingConfig
from trainer.rundir import RESULT, RunDir

LEAST_STEPS, MOST_STEPS, SHARE_OF_TRAINING = 24, 120, 0.1
"""A probe does a tenth of the training's steps, within these bounds: of a long training, next to nothing."""
WINDOWS = 6
"""Least number of logged intervals of a probe, of which the first warms up."""
MANY_EVALUATIONS = 4
"""Evaluations of a training from which a probe has two: the first takes up to twice as long as all after it."""
TRACKING_SHARE = 0.8
"""Delay of a training by its trackers, as a share of the start-up of a rank that has a core to itself: both are
imports. A probe is tracked nowhere."""
PAID_BY = "paid_by.json"
"""File of a probe's run directory: the job that pays for it. The first training that rests on it does, and no other."""
GUESSED_SECONDS = 7.0
"""Seconds of a probe whose ranks have a core each, where nothing better is known: a guess."""
PAST_SPREAD, GUESS_SPREAD = 0.35, 0.75
"""Standard deviation of the logarithm of a probe's time, with probes of other trainings and without."""


def probe_counts(node_count: int, has_limits: bool) -> tuple[int, ...]:
    """Return the node counts that are worth a probe, that of the plan last. Where a deadline or a budget may ask for
    fewer nodes, one and two as well: between them and the plan's the rest is interpolated."""
    others = [count for count in (1, 2) if count < node_count] if has_limits else []
    return (*others, node_count)


def probe_id(mark: str, node_count: int) -> str:
    """Return the id of a probe's job. ``mark``: of the training and of what it runs on."""
    return f"probe-{mark}-{node_count}n"


def probe_job(job: JobConfig, jobs_uri: str, mark: str, node_count: int, sizes: Sizes) -> JobConfig:
    """Return the same training, cut to some steps and one or two evaluations, tracked nowhere."""
    job_id, work = probe_id(mark, node_count), sizes.work(node_count)
    steps = min(work.steps, max(LEAST_STEPS, min(MOST_STEPS, round(SHARE_OF_TRAINING * work.steps))))
    training = replace(
        job.training,
        world_size=sizes.ranks(node_count),
        max_steps=steps,
        eval_frequency=-(-steps // 2) if work.evaluations >= MANY_EVALUATIONS else steps,
        checkpoint_frequency=steps,
        log_frequency=max(1, min(job.training.log_frequency, steps // WINDOWS)),
    )
    tracking = TrackingConfig(tensorboard=False)
    return replace(job, job_id=job_id, run_dir=f"{jobs_uri}/{job_id}", training=training, tracking=tracking)


def probes_to_run(jobs_uri: str, mark: str, counts: Sequence[int]) -> tuple[int, ...]:
    """Return those of the node counts on which no probe has succeeded yet."""
    return tuple(count for count in counts if not has_succeeded(RunDir(f"{jobs_uri}/{probe_id(mark, count)}")))


def run_probes(
    manager: GPUClusterManager,
    job: JobConfig,
    sizes: Sizes,
    counts: Sequence[int],
    mark: str,
    env: dict[str, str],
    learned: LearnedCorrection,
    tell: Callable[[str], object] = lambda sentence: None,
    left: Callable[[], float | None] = lambda: None,
    command: tuple[str, ...] | None = None,
) -> Forecast:
    """Return the forecast from probes on these node counts (the planned one last), run now or read from before.
    ``tell`` is called before each with a sentence that says which; ``left`` returns the node-seconds that the next one
    may take, None for any. ``command``: of a script that trains. Raise `BudgetSpentError` where a probe came to that
    limit, and as `run_probe` does."""
    jobs_uri = job.run_dir.rpartition("/")[0]
    measured, words, jobs, reused = [], [], [], True
    for count in counts:
        short = probe_job(job, jobs_uri, mark, count, sizes)
        rundir = RunDir(short.run_dir)
        if has_succeeded(rundir):
            tell(f"the probe {short.job_id} was run before")
        else:
            tell(f"probing on {count} node(s): job {short.job_id}")
            bounded = replace(short, training=replace(short.training, max_node_seconds=left()))
            run_probe(manager, bounded, count, sizes.processes_per_node, env, tell, command)
            reused = False
        done = rundir.read_job().training  # an earlier probe may have had more steps
        item = read_measured(list(rundir.events()), rundir.nodes(), count, done.global_batch_size, bool(sizes.cores))
        tracking = TRACKING_SHARE * item.startup_seconds / sizes.crowding(count)
        item = replace(item, startup_seconds=item.startup_seconds + tracking)  # where a run that is tracked has it
        measured.append(item)
        jobs.append(short.job_id)
        words.append(f"{done.max_steps} steps on {count} node(s)")
    return Forecast(
        measured=tuple(reversed(measured)),
        sizes=sizes,
        basis="probe",
        basis_words=f"a probe of {', '.join(words)}"
        + (", measured before and reused: nothing that matters to it has changed since" if reused else ""),
        learned=learned,
        rests_on=tuple(reversed(jobs)),
    )


def run_probe(
    manager: GPUClusterManager,
    job: JobConfig,
    node_count: int,
    processes_per_node: int,
    env: dict[str, str],
    tell: Callable[[str], object] = lambda text: None,
    command: tuple[str, ...] | None = None,
) -> None:
    """Run a short job and wait for its end. ``tell`` is called with what it waits for. ``command``: of a script that
    trains it.

    Raise `ClusterError` with the job's own message where it fails, `NoCapacityError` where no nodes came for it,
    `BudgetSpentError` where it comes to its limit.
    """
    rundir = RunDir(job.run_dir)
    start_job(manager, job, node_count, processes_per_node, env, command=command)
    wait_news = WaitNews()
    try:
        for status, _ in follow_job(manager, rundir, job.job_id):
            if sentence := wait_news.tell(status):
                tell(f"{job.job_id}: {sentence}")
    except BaseException:
        manager.cancel_job(job.job_id)
        raise
    if ran_out(rundir):
        raise BudgetSpentError(f"job {job.job_id}, a short run to measure this training: {status.message}")
    status.refuse_starved()
    if status.state is not JobState.SUCCEEDED:
        raise ClusterError(f"job {job.job_id}, a short run to measure this training, {status.state}: {status.message}")


def has_succeeded(rundir: RunDir) -> bool:
    result = rundir.read_json(RESULT)
    return result is not None and result["status"] == "succeeded"


@dataclass(frozen=True, kw_only=True, slots=True)
class PastProbe:
    """A probe that has run: on what, and for how long."""

    job_id: str
    sku: str
    node_count: int
    processes_per_node: int
    seconds: float
    """Wall seconds in which a node of it was paid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedProbe:
    """The expected cost of the probes of a plan, before any is bought."""

    seconds: Interval
    """Wall seconds, one probe after the other."""
    usd: Interval
    basis: str

    def __str__(self) -> str:
        return f"{self.usd.told(dollars)} and {self.seconds.told(format_duration)}, from {self.basis}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The pace of a planned training, and what it cost to learn it."""

    planned: PlannedJob
    """The plan on the nodes that are available, which may be others than those asked for."""
    forecast: Forecast
    expected: ExpectedProbe | None = None
    """The expected cost of the probes before they ran; None where none had to be run."""
    charges: tuple[ProbeCharge, ...] = ()
    """The probes that the forecast rests on and that no training has paid for, run now or before."""
    seconds: float = 0.0
    """Wall seconds of the probes that were run now."""


def explain_dear_probe(probe: ExpectedProbe, limits: Limits, stop_at_usd: float) -> str | None:
    """Return in words why not even the plan's probe fits its limits; None where it does, as expected."""
    caps = {"budget_usd": limits.budget_usd, "stop_at_usd": stop_at_usd}
    said = [f"{name} is {dollars(limit)}" for name, limit in caps.items() if 0 < limit < probe.usd.expected]
    if 0 < limits.deadline_hours * 3600 < probe.seconds.expected:
        said.append(f"deadline_hours is {limits.deadline_hours:g}")
    return f"the probe alone would take {probe}, and {' and '.join(said)}" if said else None


def expect_probes(
    past: Sequence[PastProbe], counts: Sequence[int], sizes: Sizes, price: SkuPrice, tier: Tier
) -> ExpectedProbe | None:
    """Return the expected cost of probes on these node counts; None where there are none to run. Pure.

    It rests on past probes on this SKU, of any training: on the same number of nodes, or else on the nearest, by how
    many ranks share a core. Without any it is a guess, and its interval says so. Raise `PriceError` for nodes without
    a price.
    """
    if not counts:
        return None
    alike = [item for item in past if item.sku == price.sku and item.processes_per_node == sizes.processes_per_node]
    spread = PAST_SPREAD if alike else GUESS_SPREAD
    each = {count: _expected_seconds(alike, count, sizes) for count in counts}
    factor = math.exp(CONFIDENCE_90 * spread)
    seconds, node_seconds = sum(each.values()), sum(count * value for count, value in each.items())
    usd = node_seconds / 3600 * price.usd_per_hour(tier)
    words = f"{len(alike)} past probe(s) on {price.sku}" if alike else "no past probe: a guess"
    return ExpectedProbe(
        seconds=Interval(low=seconds / factor, expected=seconds, high=seconds * factor),
        usd=Interval(low=usd / factor, expected=usd, high=usd * factor),
        basis=words,
    )


def _expected_seconds(alike: Sequence[PastProbe], count: int, sizes: Sizes) -> float:
    if not alike:
        return sizes.crowding(count) * GUESSED_SECONDS
    nearest = min(abs(math.log(item.node_count / count)) for item in alike)
    took = [
        item.seconds * sizes.crowding(count) / sizes.crowding(item.node_count)
        for item in alike
        if abs(math.log(item.node_count / count)) == nearest
    ]
    return statistics.median(took)


def unpaid_charges(manager: GPUClusterManager, jobs_uri: str, job_ids: Sequence[str]) -> tuple[ProbeCharge, ...]:
    """Return the charges of those probes that no training pays for yet, as far as the cluster knows them."""
    found = []
    for job_id in job_ids:
        if payer_of(RunDir(f"{jobs_uri}/{job_id}")) is None:
            with suppress(ClusterError):
                found.append(ProbeCharge(job_id=job_id, usage=tuple(manager.node_usage(job_id))))
    return tuple(found)


def charge_usd(charges: Sequence[ProbeCharge], tier: Tier) -> float:
    return CostTracker("", [item for charge in charges for item in charge.usage], tier).total_usd


def charge_seconds(charges: Sequence[ProbeCharge]) -> float:
    return sum(paid_wall_seconds(charge.usage) for charge in charges)


def charge_node_seconds(charges: Sequence[ProbeCharge]) -> float:
    return sum(3600 * item.hours for charge in charges for item in charge.usage)


def payer_of(rundir: RunDir) -> str | None:
    """Return the id of the job that pays for this probe, None while none does."""
    document = rundir.read_json(PAID_BY)
    return document["job_id"] if document else None


def take_charges(jobs_uri: str, charges: Sequence[ProbeCharge], job_id: str) -> tuple[ProbeCharge, ...]:
    """Make this job pay for those of the probes that no other job pays for, and return them."""
    mine = []
    for charge in charges:
        rundir = RunDir(f"{jobs_uri}/{charge.job_id}")
        with suppress(FileExistsError):
            rundir.storage.create(PAID_BY, json.dumps({"job_id": job_id}).encode())
        if payer_of(rundir) == job_id:
            mine.append(charge)
    return tuple(mine)


def left_node_seconds(limit_usd: float, charges: Sequence[ProbeCharge], price: SkuPrice, tier: Tier) -> float | None:
    """Return the node-seconds that the limit leaves for a probe after these charges; None without a limit. Pure."""
    if not limit_usd:
        return None
    left = limit_usd - charge_usd(charges, tier)
    return node_seconds_of(max(0.0, left), (), price.sku, tier)
