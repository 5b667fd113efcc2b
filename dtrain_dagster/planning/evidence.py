"""What is known of a planned training's pace: past runs of a Dagster instance or of a home, how good their estimates
were, and probes, which are short runs of it on the planned cluster.

A probe goes through all that the training will go through (data, model, steps, evaluation, checkpoint, report), so a
model that raises or a disk that is full shows here, before the training is paid for. What is decided from all this is
in `build_plan`.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.clusters.base import ClusterError, GPUClusterManager, JobState
from dtrain_dagster.costs.estimate import (
    PRIOR_SPREAD,
    Basis,
    Forecast,
    Interval,
    LearnedCorrection,
    Measured,
    Sizes,
    distance,
)
from dtrain_dagster.costs.plan import PLAN, ProbeCharge
from dtrain_dagster.costs.prices import SkuPrice, hardware_of
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.jobs.orders import latest_orders
from dtrain_dagster.jobs.progress import WaitNews, follow_job
from dtrain_dagster.jobs.start import BudgetSpentError, ran_out, start_job
from dtrain_dagster.monitoring.windows import COMMUNICATION_SEGMENTS, settled, shares, windows
from dtrain_dagster.planning.build_plan import Limits, PlannedJob, pace_mark
from dtrain_dagster.planning.scoring import MOST_RUNS, PRIOR_RUNS, Score, learn
from dtrain_dagster.settings.cluster_kinds import Tier
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames
from trainer.config import JobConfig, TrackingConfig
from trainer.documents.events import EvaluationEvent, PhaseEvent, StepEvent, TimingEvent, read_events
from trainer.documents.presences import NodePresence
from trainer.rundir import LAUNCH, RESULT, RunDir

if TYPE_CHECKING:
    import dagster as dg

LOOK_BACK = 60
"""Number of the latest materializations of an asset that are read."""
MOST_READ = 5
"""Run directories whose events are read: a long training has many events."""
_log = logging.getLogger(__name__)
SLOW_PARTS = 3
OUTLIER = 3.0
"""Times the median from which an interval is an outlier: something else was going on."""
SETTLED_FROM = 12
"""Number of intervals from which only the second half is typical: while rank 0 opens its trackers, which is seconds of
Python, its steps take several times as long."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCourse:
    """The incidents between a job's start and its end."""

    launches: int
    replaced_nodes: int
    generations: int
    """Number of generations that it trained with, one after the other."""

    @classmethod
    def read(cls, rundir: RunDir) -> JobCourse:
        nodes = rundir.nodes()
        return cls(
            launches=max((node.launch for node in nodes), default=1),
            replaced_nodes=sum(node.incarnation > 1 for node in nodes),
            generations=rundir.last_generation(),
        )

    @property
    def disturbed(self) -> str:
        """Return the incidents in words; "" for a job without any."""
        said = [f"it was started {self.launches} times"] if self.launches > 1 else []
        said += [f"{self.replaced_nodes} node(s) were replaced"] if self.replaced_nodes else []
        said += [f"nodes were lost or joined, {self.generations} generations in all"] if self.generations > 1 else []
        return "; ".join(said)


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRun:
    """A training that finished, whose run directory is still there."""

    job_id: str
    measured: Measured


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What an instance knows that bears on one training on nodes of one SKU."""

    sku: str
    runs: tuple[PastRun, ...]
    scores: tuple[Score, ...]

    @classmethod
    def read(
        cls,
        instance: dg.DagsterInstance,
        pace: str,
        sku: str,
        keeps_cache: bool,
        names: GraphNames = STOCK_NAMES,
    ) -> History:
        """Return the records of past runs of this pace, and of all estimates of the graph."""
        runs = past_runs(instance, pace, sku, keeps_cache, names)
        return cls(sku=sku, runs=tuple(runs), scores=tuple(past_scores(instance, names)))

    def learned(self, basis: Basis) -> LearnedCorrection:
        return learn(self.scores, basis, self.sku)

    def forecast(self, sizes: Sizes, node_count: int) -> Forecast | None:
        """Return the forecast from past runs, None where there are none."""
        return from_history(self.runs, sizes, node_count, self.learned("history"))


def past_runs(
    instance: dg.DagsterInstance, pace: str, sku: str, keeps_cache: bool, names: GraphNames = STOCK_NAMES
) -> list[PastRun]:
    """Return the latest runs of the same pace on this SKU, the newest first, that lost no node and did not start
    again."""
    made = _materializations(instance, names.key("trained_checkpoint"))
    folders = (RunDir(str(said["run_dir"])) for _, _, said in made if "run_dir" in said)
    return _usable(folders, keeps_cache, lambda plan: bool(plan) and plan.get("pace") == pace, sku)


class HomeHistory:
    """Past runs of a home, by its latest orders, as evidence for a training that no Dagster asset plans."""

    def __init__(self, home: Path, processes_per_node: int, sku: str, shares_machine: bool) -> None:
        """``sku``: the wanted one, and that of runs that name none. ``shares_machine``: whether all nodes are this
        machine, which keeps what was unpacked for the next run."""
        self.processes_per_node, self.sku, self.shares_machine = processes_per_node, sku, shares_machine
        self._orders = [(self._mark(job), job) for job in latest_orders(home, LOOK_BACK)]
        self._runs: dict[str, list[PastRun]] = {}

    def forecast(self, job: JobConfig, sizes: Sizes) -> Forecast | None:
        """Return what past runs of the same pace and global batch tell of a job, on the nodes of the latest of them."""
        runs = self.runs_like(job)
        nodes, sizes = runs[0].measured.node_count if runs else 0, replace(sizes, stated_ranks=job.training.world_size)
        return from_history(runs, sizes, nodes, LearnedCorrection())

    def runs_like(self, job: JobConfig) -> list[PastRun]:
        """Return the latest runs of the same pace and global batch, as `past_runs` does."""
        mark = self._mark(job)
        if mark not in self._runs:
            folders = (RunDir(order.run_dir) for its, order in self._orders if its == mark)
            self._runs[mark] = _usable(folders, self.shares_machine, lambda plan: True, self.sku)
        return self._runs[mark]

    def _mark(self, job: JobConfig) -> str:
        return f"{pace_mark(job, self.processes_per_node)}-w{job.training.world_size}"


def _usable(
    folders: Iterable[RunDir], keeps_cache: bool, is_wanted: Callable[[Mapping[str, Any]], bool], sku: str
) -> list[PastRun]:
    """Return the first `MOST_READ` runs on this SKU that can be learned from. ``is_wanted``: by their plan."""
    found: list[PastRun] = []
    for rundir in folders:
        if len(found) == MOST_READ:
            break
        try:
            plan, result = rundir.read_json(PLAN) or {}, rundir.read_json(RESULT)
            if not is_wanted(plan) or not result or result["status"] != "succeeded" or JobCourse.read(rundir).disturbed:
                continue
            if hardware_of((rundir.read_json(LAUNCH) or {}).get("sku", plan.get("sku", sku))).sku != sku:
                continue
            nodes = rundir.nodes()
            count, batch = len({node.node_id for node in nodes}), rundir.read_job().training.global_batch_size
            measured = read_measured(list(rundir.events()), nodes, count, batch, keeps_cache)
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.info("the run directory %s cannot be used: %r", rundir.uri, error)
            continue
        found.append(PastRun(job_id=rundir.uri.rsplit("/", 1)[-1], measured=measured))
    return found


def read_measured(
    events: Sequence[dict[str, Any]],
    nodes: Sequence[NodePresence],
    node_count: int,
    global_batch_size: int,
    keeps_cache: bool,
) -> Measured:
    """Return the durations of a finished run. ``keeps_cache``: shards that it unpacked are there for the next. Pure."""
    launch = max(node.launch for node in nodes)
    nodes = [node for node in nodes if node.launch == launch]
    begin = min(node.started_at for node in nodes)
    events = [item for item in events if item["time"] >= begin]  # their generations count regroups, not launches
    end = max(node.ended_at or node.started_at for node in nodes)
    phases = [phase for phase in read_events(PhaseEvent, events) if phase.rank == 0]
    seconds = {phase.name: phase.seconds for phase in phases}  # running sums: the last one counts
    ready = max(phase.time for phase in phases if phase.name == "startup")
    saves = sum(phase.name == "checkpoint" for phase in phases)
    judged = [item.seconds or 0.0 for item in read_events(EvaluationEvent, events) if item.split == "valid"]
    evaluation = statistics.fmean(judged[1:] or judged or [0.0])
    training, judging, saving = (seconds.get(name, 0.0) for name in ("training", "evaluation", "checkpoint"))

    timed = windows(events)
    parts = shares(settled(timed))
    growing = sum(parts[name] for name in ("input", "forward", "backward")) if parts else 1.0
    intervals = _intervals(events, timed, global_batch_size)
    sizes = [1 - growing + growing * fill for _, _, fill in intervals]
    full = [each / size for (_, each, _), size in zip(intervals, sizes, strict=True)]
    full = full[len(full) // 2 if len(full) >= SETTLED_FROM else 1 :] or full
    limit = OUTLIER * statistics.median(full)
    full = [min(each, limit) for each in full]
    typical = statistics.fmean(full)
    usual = sum(count * typical * size for (count, _, _), size in zip(intervals, sizes, strict=True))
    startup = ready - begin - (seconds.get("data", 0.0) if keeps_cache else 0.0)
    return Measured(
        node_count=node_count,
        startup_seconds=max(0.0, startup),
        warm_up_seconds=max(0.0, training - usual) + max(0.0, judging - evaluation * len(judged)),
        step_seconds=typical,
        step_spread=step_spread(full),
        sample_share=growing,
        compute_share=sum(parts[name] for name in ("forward", "backward", "optimizer")) if parts else 1.0,
        communication_share=sum(parts.get(name, 0.0) for name in COMMUNICATION_SEGMENTS),
        evaluation_seconds=evaluation,
        checkpoint_seconds=saving / max(1, saves),
        finish_seconds=max(0.0, end - ready - training - judging - saving - seconds.get("regroup", 0.0)),
    )


def step_spread(intervals: Sequence[float]) -> float:
    """Return the relative standard deviation of the mean of these seconds per step, one interval after the other.

    Intervals that vary by themselves average out. A machine that is slower for some of them does not: a training meets
    other such times than its probe did. So what `SLOW_PARTS` parts of the probe differ by, beyond what their intervals
    explain, counts in full.
    """
    if len(intervals) < 2:
        return 0.0
    mean = statistics.fmean(intervals)
    fast = statistics.variance(intervals)
    if len(intervals) < 2 * SLOW_PARTS:
        return math.sqrt(fast / len(intervals)) / mean
    edges = [round(part * len(intervals) / SLOW_PARTS) for part in range(SLOW_PARTS + 1)]
    parts = [intervals[first:last] for first, last in pairwise(edges)]
    # Differences of neighbours hold only what varies from one interval to the next.
    quick = sum((after - before) ** 2 for before, after in pairwise(intervals)) / 2 / (len(intervals) - 1)
    slow = statistics.variance(map(statistics.fmean, parts)) - quick * SLOW_PARTS / len(intervals)
    return math.sqrt(fast / len(intervals) + max(0.0, slow)) / mean


def _intervals(
    events: Sequence[Mapping[str, Any]], timed: Sequence[TimingEvent], global_batch_size: int
) -> list[tuple[int, float, float]]:
    """Return (steps, seconds of each, how full their batches were) from one ``step`` event to the next."""
    fills = {item.step: sum(item.samples) / (item.steps * global_batch_size) for item in timed if item.samples}
    found, before = [], 0
    for item in read_events(StepEvent, events):
        count = item.step - before
        if count > 0 and item.step_seconds is not None:  # not one of steps that a regroup did again
            found.append((count, item.step_seconds, fills.get(item.step, 1.0)))
            before = item.step
    return found


def past_scores(instance: dg.DagsterInstance, names: GraphNames = STOCK_NAMES) -> list[Score]:
    """Return the scores of finished runs, the oldest first: for each job the last one of `cost_breakdown`."""
    latest: dict[str, tuple[float, Mapping[str, Any]]] = {}
    for at, _, said in _materializations(instance, names.key("cost_breakdown")):
        latest.setdefault(str(said.get("job_id")), (at, said))
    scores = (score_of(at, said) for at, said in latest.values())
    return [score for score in scores if isinstance(score, Score)][:MOST_RUNS][::-1]


def latest_score(
    instance: dg.DagsterInstance, run_id: str, names: GraphNames = STOCK_NAMES
) -> tuple[str, Score | str] | None:
    """Return the id of the job of the last `cost_breakdown`, in this Dagster run if it made one, with its score or why
    it has none. None where there never was a breakdown."""
    told = _materializations(instance, names.key("cost_breakdown"))
    if not told:
        return None
    at, _, said = next((item for item in told if item[1] == run_id), told[0])
    return str(said.get("job_id", "unknown")), score_of(at, said)


def score_of(at: float, said: Mapping[str, Any]) -> Score | str:
    """Return the score from the metadata of a breakdown, or in words why there is none."""
    try:
        ran, planned = (said["sku"], said["tier"]), (said["planned_sku"], said["planned_tier"])
        if not said["wall_seconds"]:
            return "no record says when its nodes were there"
        if ran != planned:
            return "it ran on {} ({}), and the estimate was for {} ({})".format(*ran, *planned)
        usd = Interval(low=said["estimated_low_usd"], expected=said["estimated_usd"], high=said["estimated_high_usd"])
        if not (usd.expected > 0 and said["estimated_seconds"] > 0):
            return "its estimate is too small to be compared with"
        course = JobCourse(**{item.name: said[item.name] for item in fields(JobCourse)})
        return Score(
            at=at,
            job_id=said["job_id"],
            basis=said["basis"],
            sku=said["sku"],
            seconds=usd.scaled(said["estimated_seconds"] / usd.expected),
            usd=usd,
            actual_seconds=said["wall_seconds"],
            actual_usd=said.get("training_usd", said["total_usd"]),
            learned_factor=said["learned_factor"],
            disturbed=course.disturbed,
        )
    except (KeyError, TypeError) as error:
        return f"its cost_breakdown lacks something, like one of an older version ({error!r}): materialize it again"


def from_history(runs: Sequence[PastRun], sizes: Sizes, node_count: int, learned: LearnedCorrection) -> Forecast | None:
    """Return the forecast from past runs, the newest for each number of nodes; None where there are none. ``runs``: of
    the same pace on the same SKU, the newest first."""
    if not runs:
        return None
    newest = {run.measured.node_count: run for run in reversed(runs)}
    found = sorted(newest.values(), key=lambda run: distance(run.measured, node_count))
    nearest = found[0].measured.node_count
    return Forecast(
        measured=tuple(run.measured for run in found),
        sizes=sizes,
        basis="history",
        basis_words=f"{len(runs)} past run(s) at the same pace, the latest {runs[0].job_id}"
        + ("" if nearest == node_count else f", on {nearest} node(s) instead of {node_count}"),
        learned=learned,
        rests_on=tuple(run.job_id for run in found),
        run_spread=spread_of_runs([run.measured.step_seconds for run in runs if run.measured.node_count == nearest]),
    )


def spread_of_runs(seconds: Sequence[float]) -> float:
    """Return the standard deviation of the logarithm of the next of these times, shrunk towards `PRIOR_SPREAD`; 0 for
    fewer than two."""
    if len(seconds) < 2 or min(seconds) <= 0:
        return 0.0
    logs = [math.log(value) for value in seconds]
    middle = statistics.fmean(logs)
    known = PRIOR_RUNS + len(logs) - 1
    squares = PRIOR_RUNS * PRIOR_SPREAD**2 + sum((value - middle) ** 2 for value in logs)
    return math.sqrt(squares / known * (1 + 1 / len(logs)))


def knows(forecast: Forecast | None, node_count: int) -> bool:
    """Return whether the forecast rests on past runs on exactly these nodes, so that a probe would tell nothing new."""
    return forecast is not None and forecast.measured[0].node_count == node_count


def _materializations(instance: dg.DagsterInstance, asset: dg.AssetKey) -> list[tuple[float, str, dict[str, Any]]]:
    """Return (when, Dagster run, metadata) of an asset's latest materializations, the newest first."""
    from dtrain_dagster.support.page_entries import read_entries  # not above: loads Dagster

    records = instance.fetch_materializations(asset, limit=LOOK_BACK).records
    return [
        (record.timestamp, record.run_id, read_entries(made.metadata))
        for record in records
        if (made := record.asset_materialization) is not None
    ]


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


def forecast_from_probe(
    manager: GPUClusterManager,
    job: JobConfig,
    sizes: Sizes,
    node_count: int,
    mark: str,
    env: dict[str, str],
    learned: LearnedCorrection,
    tell: Callable[[str], object] = lambda sentence: None,
    most: float | None = None,
    command: tuple[str, ...] | None = None,
) -> Forecast:
    """Return the forecast from a probe on so many nodes, run now or read from before. ``tell`` is called with a
    sentence that says which; ``most``: the node-seconds that it may take in all tries, None for any. ``command``: of a
    script that trains. Raise `BudgetSpentError` where the probe came to that limit, and as `run_probe` does."""
    short = probe_job(job, job.run_dir.rpartition("/")[0], mark, node_count, sizes)
    rundir, reused = RunDir(short.run_dir), ""
    if has_succeeded(rundir):
        tell(f"the probe {short.job_id} was run before")
        reused = ", measured before and reused: nothing that matters to it has changed since"
    else:
        tell(f"probing on {node_count} node(s): job {short.job_id}")
        bounded = replace(short, training=replace(short.training, max_node_seconds=most))
        run_probe(manager, bounded, node_count, sizes.processes_per_node, env, tell, command)
    done = rundir.read_job().training  # an earlier probe may have had more steps
    took = read_measured(list(rundir.events()), rundir.nodes(), node_count, done.global_batch_size, bool(sizes.cores))
    tracking = TRACKING_SHARE * took.startup_seconds / sizes.crowding(node_count)  # where a run that is tracked has it
    return Forecast(
        measured=(replace(took, startup_seconds=took.startup_seconds + tracking),),
        sizes=sizes,
        basis="probe",
        basis_words=f"a probe of {done.max_steps} steps on {node_count} node(s){reused}",
        learned=learned,
        rests_on=(short.job_id,),
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
class Pace:
    """The pace of a planned training, and what it cost to learn it."""

    planned: PlannedJob
    """The plan on the nodes that are available, which may be others than those asked for."""
    forecast: Forecast
    charges: tuple[ProbeCharge, ...] = ()
    """The probes that the forecast rests on and that no training has paid for, run now or before."""
    seconds: float = 0.0
    """Wall seconds of the probes that were run now."""


def unpaid_charges(manager: GPUClusterManager, jobs_uri: str, job_ids: Sequence[str]) -> tuple[ProbeCharge, ...]:
    """Return the charges of those probes that no training pays for yet, as far as the cluster knows them."""
    found = []
    for job_id in job_ids:
        if payer_of(RunDir(f"{jobs_uri}/{job_id}")) is None:
            with suppress(ClusterError):
                found.append(ProbeCharge(job_id=job_id, usage=tuple(manager.node_usage(job_id))))
    return tuple(found)


def bill_charges(charges: Sequence[ProbeCharge], tier: Tier) -> CostTracker:
    """Return the bill of these probes: its dollars, node-hours and wall seconds."""
    return CostTracker("", [item for charge in charges for item in charge.usage], tier)


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


def left_node_seconds(
    limits: Limits, stop_at_usd: float, charges: Sequence[ProbeCharge], price: SkuPrice, tier: Tier, node_count: int
) -> float | None:
    """Return the node-seconds that the limits leave for a probe after these charges; None without a limit. Pure."""
    paid, per_second = bill_charges(charges, tier).total_usd, price.usd_per_hour(tier) / 3600
    left = [max(0.0, usd - paid) / per_second for usd in (limits.budget_usd, stop_at_usd) if usd]
    left += [3600 * limits.deadline_hours * node_count] if limits.deadline_hours else []
    return min(left, default=None)
