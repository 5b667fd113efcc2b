"""A short run of the planned training on the planned cluster: the basis of the estimate, and a rehearsal.

The probe goes through all that the training will go through (data, model, steps, evaluation, checkpoint, report), so a
model that raises or a disk that is full shows here, before the training is paid for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from dtrain_dagster.clusters.base import ClusterError, GPUClusterManager, JobState
from dtrain_dagster.costs.estimate import Forecast, LearnedCorrection, Measured, Sizes
from dtrain_dagster.jobs.progress import BudgetSpentError, WaitNews, follow_job, ran_out, start_job
from dtrain_dagster.monitoring.windows import communication_cost, settled, shares, windows
from trainer.config import JobConfig, TrackingConfig
from trainer.documents.events import EvaluationEvent, PhaseEvent, StepEvent, TimingEvent, read_events
from trainer.documents.presences import NodePresence
from trainer.rundir import RESULT, RunDir

LISTENING_SECONDS = 1.0
"""Seconds in which the use of the cores is counted. The load averages of the system reach back a minute, in which a
probe or a training of our own may have run."""

LEAST_STEPS, MOST_STEPS, SHARE_OF_TRAINING = 24, 120, 0.1
"""A probe does a tenth of the training's steps, within these bounds: of a long training, next to nothing."""
WINDOWS = 6
"""Least number of logged intervals of a probe, of which the first warms up."""
MANY_EVALUATIONS = 4
"""Evaluations of a training from which a probe has two: the first takes up to twice as long as all after it."""
SLOW_PARTS = 3
"""Parts of a probe that are compared for slow changes."""
OUTLIER = 3.0
"""Times the median from which an interval is an outlier: something else was going on."""
SETTLED_FROM = 12
"""Number of intervals from which only the second half is typical: while rank 0 opens its trackers, which is seconds of
Python, its steps take several times as long."""
TRACKING_SHARE = 0.8
"""Delay of a training by its trackers, as a share of the start-up of a rank that has a core to itself: both are
imports. A probe is tracked nowhere, so that nothing disturbs its few steps and nobody's experiments fill up with
probes."""


def probe_counts(node_count: int, has_limits: bool) -> tuple[int, ...]:
    """Return the node counts that are worth a probe, that of the plan last. Where a deadline or a budget may ask for
    fewer nodes, one and two as well: between them and the plan's the rest is interpolated."""
    others = [count for count in (1, 2) if count < node_count] if has_limits else []
    return (*others, node_count)


def probe_job(job: JobConfig, jobs_uri: str, mark: str, node_count: int, sizes: Sizes) -> JobConfig:
    """Return the same training on ``node_count`` nodes, cut to some steps and one or two evaluations, tracked nowhere.

    ``mark`` identifies a measurement that can be used again: the training, and what it runs on.
    """
    job_id = f"probe-{mark}-{node_count}n"
    work = sizes.work(node_count)
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
    loads = [cores_of_others(sizes)]
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
            loads.append(cores_of_others(sizes))
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
        other_cores=max(loads),
    )


def probes_to_run(job: JobConfig, jobs_uri: str, mark: str, counts: Sequence[int], sizes: Sizes) -> tuple[int, ...]:
    """Return those of the node counts on which no probe has succeeded yet."""
    shorts = {count: probe_job(job, jobs_uri, mark, count, sizes) for count in counts}
    return tuple(count for count, short in shorts.items() if not has_succeeded(RunDir(short.run_dir)))


def run_probe(
    manager: GPUClusterManager,
    job: JobConfig,
    node_count: int,
    processes_per_node: int,
    env: dict[str, str],
    tell: Callable[[str], object] = lambda text: None,
    command: tuple[str, ...] | None = None,
) -> None:
    """Run a short job and wait for its end, unless that was done before. ``tell`` is called with what it waits for.
    ``command``: of a script that trains it.

    Raise `ClusterError` with the job's own message where it fails, `NoCapacityError` where no nodes came for it,
    `BudgetSpentError` where it comes to its limit.
    """
    rundir = RunDir(job.run_dir)
    if has_succeeded(rundir):
        return
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
    """Return whether the result says that the job succeeded."""
    result = rundir.read_json(RESULT)
    return result is not None and result["status"] == "succeeded"


def of_last_launch(
    events: Sequence[dict[str, Any]], nodes: Sequence[NodePresence]
) -> tuple[list[dict[str, Any]], list[NodePresence]]:
    """Return the events and presences of the last launch. Time decides: events' generations count regroups, not
    launches."""
    launch = max(node.launch for node in nodes)
    nodes = [node for node in nodes if node.launch == launch]
    begin = min(node.started_at for node in nodes)
    return [item for item in events if item["time"] >= begin], nodes


def read_measured(
    events: Sequence[dict[str, Any]],
    nodes: Sequence[NodePresence],
    node_count: int,
    global_batch_size: int,
    keeps_cache: bool,
) -> Measured:
    """Return the durations of a finished run, from the records of its last launch. Pure.

    ``keeps_cache``: shards that it had to unpack are there for the next one.
    """
    events, nodes = of_last_launch(events, nodes)
    begin = min(node.started_at for node in nodes)
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
        communication_share=communication_cost(settled(timed)).total,
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


def cores_of_others(sizes: Sizes) -> float:
    """Return how many cores of the machine are in use, counted for a second while nothing of the plan runs on it; 0
    where each node is a machine of its own, which cannot be seen from here."""
    if not sizes.cores:
        return 0.0
    import psutil  # not above: loading the code location does without

    return min(float(sizes.cores), psutil.cpu_percent(interval=LISTENING_SECONDS) / 100 * sizes.cores)
