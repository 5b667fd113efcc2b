"""Progress of a running job in Dagster: observations, news, and alerts about its speed."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import dagster as dg

from dtrain_dagster.assets.cluster_run import ClusterRun
from dtrain_dagster.assets.common import round_figures
from dtrain_dagster.clusters.base import ClusterError, GPUClusterManager, JobState, JobStatus
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.jobs.progress import WaitNews, describe_wait, follow_job
from dtrain_dagster.jobs.start import ran_out
from dtrain_dagster.jobs.totals import sum_launches
from dtrain_dagster.jobs.view import RESUMED, JobView
from dtrain_dagster.monitoring.windows import COMMUNICATION_SEGMENTS
from dtrain_dagster.planning.projection import Projection, TimeLeft, count_nodes, describe_training, project, time_left
from dtrain_dagster.settings.cluster_kinds import Tier
from dtrain_dagster.support.formatting import dollars, in_block
from dtrain_dagster.support.notify import notify_and_log
from trainer.errors import DamagedError
from trainer.printable import visible
from trainer.rundir import RunDir

RAISE_BUDGET = (
    "raise stop_at_usd of cost_estimate (or remove it) and materialize cost_estimate and trained_checkpoint again"
)
OBSERVE_EVERY_SECONDS = 5.0
TOLD = "alerts.json"
"""The file in a run directory that lists what people have been told, and when."""
NEWS = "news: "
MOST_NEWS = 20
"""The most messages on lost nodes, hangs and the like that are sent for one job; later ones are only in the log."""


def follow(
    run: ClusterRun,
    rundir: RunDir,
    job_id: str,
    tier: Tier,
    has_nodes: Callable[[], object],
    is_training: bool = False,
) -> Iterator[tuple[JobStatus, JobView, bool]]:
    """Yield the job's status and view until it has ended, and whether an observation is due. ``has_nodes`` is called at
    each look that finds it on its nodes. ``is_training``: whether the trainer writes its result, which tells of a spent
    budget; a user's program may write any. Raise `dagster.Failure`, with its log and its cost, if it does not succeed,
    `NoCapacityError` where no nodes came for it."""
    observed_at, wait_news, log = 0.0, WaitNews(), run.context.log
    for status, view in follow_job(run.manager, rundir, job_id):
        if sentence := wait_news.tell(status):
            log.info(f"{job_id}: {sentence}")
        is_due = time.monotonic() - observed_at >= OBSERVE_EVERY_SECONDS
        observed_at = time.monotonic() if is_due else observed_at
        yield status, view, is_due
        if status.state in (JobState.RUNNING, JobState.SUCCEEDED):
            has_nodes()
    if status.state is JobState.SUCCEEDED:
        return
    status.refuse_starved()
    is_spent = is_training and ran_out(rundir)
    raise dg.Failure(
        description=visible(view.explained(f"job {job_id} {status.state}: {status.message}"), keep_lines=True)
        + (f"; {RAISE_BUDGET}" if is_spent else ""),
        metadata={
            "job_id": job_id,
            "log": dg.MarkdownMetadataValue(in_block(log_of(run.manager, job_id))),
            **paid(run.manager, job_id, tier),
        },
        allow_retries=status.state is JobState.FAILED and not is_spent,
    )


def follow_training(
    run: ClusterRun,
    rundir: RunDir,
    job_id: str,
    plan: TrainingPlan,
    has_nodes: Callable[[], object] = lambda: None,
) -> None:
    """Follow a training to its end, with an observation every few seconds, and tell people of news. Raise as
    `follow`."""
    phase, log = "", run.context.log
    told: dict[str, Any] | None = None
    judged: Sequence[Mapping[str, Any]] = ()
    planned = asdict(plan)
    for status, view, is_due in follow(run, rundir, job_id, plan.tier, has_nodes, is_training=True):
        if view.phase != phase:
            phase = view.phase
            log.info(f"{job_id}: {phase}")
        for sentence in view.news:
            log.warning(f"{job_id}: {sentence}")
        try:
            told = (rundir.read_json(TOLD) or {}) if told is None else told
            urls = run.project.notify_urls()
            tell_news(view.news, told, run.context, rundir, urls)
            if view.recent != judged:
                judged = view.recent
                tell_of(judged, told, run.context, rundir, plan.job["training"], urls)
            if not is_due:
                continue
            waiting, usage = describe_wait(status), run.manager.node_usage(job_id)
            if usage or view.step:  # from the first node on: a node is paid for even before its first step
                cost = project(CostTracker("", usage, plan.tier), planned, view)
                left = None if status.state.is_final else time_left(view, planned, time.time())
                observe(run.context, progress_metadata(view, plan, cost, left, waiting))
                log.info(describe_progress(view, plan, cost, left))
            elif waiting:  # nothing is paid yet
                observe(run.context, {"phase": view.phase, "waiting": waiting})
        except Exception:  # of any kind: a failed message about a job must not end the run that follows it
            error = traceback.format_exc()  # in the message: Dagster keeps no other part of a record
            told_error = visible(error, keep_lines=True)
            log.warning(f"{job_id}: its progress could not be reported; it is still followed\n{told_error}")


def paid(manager: GPUClusterManager, job_id: str, tier: Tier) -> Mapping[str, Any]:
    """Return metadata: the time of nodes and the dollars until now; nothing where they cannot be known."""
    try:
        usage = manager.node_usage(job_id)
        return totals_metadata(usage, tier) if usage else {}
    except (ClusterError, DamagedError):
        return {}


def totals_metadata(usage: Sequence[NodeUsage], tier: Tier) -> dict[str, Any]:
    """Return metadata: what a job took over all launches."""
    took = sum_launches(usage, tier)
    metadata: dict[str, Any] = {
        "launches": took.launches,
        "wall_seconds": round(took.seconds, 1),
        "node_hours": round(took.node_hours, 5),
    }
    if took.usd is not None:
        metadata["cost_usd"] = round(took.usd, 5)
    return metadata


def observe(context: dg.AssetExecutionContext, metadata: dict[str, Any]) -> None:
    """Record an observation of the asset that the context makes."""
    context.log_event(dg.AssetObservation(asset_key=context.asset_key, metadata=metadata))


def log_of(manager: GPUClusterManager, job_id: str) -> str:
    """Return the end of a job's logs, as text that may be shown anywhere."""
    try:
        return visible(manager.job_logs(job_id, tail=40), keep_lines=True)
    except (ClusterError, DamagedError) as error:  # how the job ended is known without them
        return visible(str(error), keep_lines=True)


def tell_news(
    news: Sequence[str],
    told: dict[str, Any],
    context: dg.AssetExecutionContext,
    rundir: RunDir,
    notify_urls: Sequence[str],
) -> None:
    """Send people unusual events, such as lost nodes and hangs: each once per job, as `tell_of` does. That it has
    resumed is told by its cluster (`dtrain_dagster.clusters.notices`)."""
    job_id = rundir.uri.rsplit("/", 1)[-1]
    for sentence in news:
        key = f"{NEWS}{sentence}"
        count = sum(known.startswith(NEWS) for known in told)
        if key in told or count >= MOST_NEWS or sentence.startswith(RESUMED):
            continue
        told[key] = {"sentence": sentence, "at": time.time()}
        last = " (further news of this job is only in its log)" if count + 1 == MOST_NEWS else ""
        notify_and_log(notify_urls, f"dtrain: {job_id}", f"{sentence}{last}", context.log)
        rundir.write_json(TOLD, told)


def tell_of(
    recent: Sequence[Mapping[str, Any]],
    told: dict[str, Any],
    context: dg.AssetExecutionContext,
    rundir: RunDir,
    training: Mapping[str, Any],
    notify_urls: Sequence[str],
) -> None:
    """Tell people of a bottleneck, if there is one: once per job, however many runs follow it. ``told`` is the content
    of `TOLD`; it is extended."""
    from dtrain_dagster.monitoring.alerts import COMMUNICATION, alerts
    from dtrain_dagster.monitoring.strategies import change_table

    job_id = rundir.uri.rsplit("/", 1)[-1]
    for alert in alerts(recent, told, training):
        told[alert.key] = {"sentence": alert.sentence, "at": time.time()}
        text = visible(alert.text, keep_lines=True)
        context.log.warning(f"{job_id}: {text}")
        if alert.key == COMMUNICATION:
            check = dg.AssetCheckEvaluation(
                asset_key=context.asset_key,
                check_name="communication_within_limits",
                passed=False,
                severity=dg.AssetCheckSeverity.WARN,
                metadata=communication_shares(alert.figures)
                | {"strategies": dg.MarkdownMetadataValue(change_table(alert.changes))},
            )
            context.log_event(check)
        notify_and_log(notify_urls, f"dtrain: {job_id}: {alert.title}", text, context.log)
        rundir.write_json(TOLD, told)  # last: where this fails, people have still been told


def progress_metadata(
    view: JobView, plan: TrainingPlan, cost: Projection, left: TimeLeft | None = None, waiting: str = ""
) -> dict[str, Any]:
    """Return the known figures of an observation of the running asset, as numbers, so that the UI plots them.
    ``waiting``: why nodes have no place yet, in words."""
    over = cost.over_at_end
    fields = {
        "phase": view.phase,
        "waiting": waiting or None,
        "step": view.step or None,
        "steps_planned": plan.work.steps,
        "epoch": view.epoch or None,
        "loss": view.loss,
        "valid_loss": view.valid_loss,
        "samples_per_second": view.samples_per_second,
        "eta_seconds": left.seconds if left else None,
        "nodes_alive": view.nodes_alive,
        "cost_so_far_usd": cost.so_far,
        "projected_cost_usd": cost.at_end.expected if cost.at_end else None,
        "projected_cost_low_usd": cost.at_end.low if cost.at_end else None,
        "projected_cost_high_usd": cost.at_end.high if cost.at_end else None,
        "estimated_usd": cost.estimated,
        "over_estimate_percent": None if over is None else round(100 * over, 2),
        **communication_shares(view.shares()),
    }
    return {name: round_figures(value) for name, value in fields.items() if value is not None}


def describe_progress(view: JobView, plan: TrainingPlan, cost: Projection, left: TimeLeft | None = None) -> str:
    """Return the same figures as one line of the log."""
    parts = describe_training(view, plan.work.steps, left, with_share=True)
    if shares := view.shares():
        parts.append(f"network {shares['communication']:.0%}, waiting {shares['waiting']:.0%}")
    told = [f"{dollars(cost.so_far)} so far"]
    if cost.at_end and cost.over_at_end is not None:
        told.append(f"{dollars(cost.at_end.expected)} at the end, {cost.over_at_end:+.0%} to the estimate")
    return " · ".join([*parts, count_nodes(view.nodes_alive), f"{', '.join(told)} ({plan.price_words})"])


def communication_shares(shares: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of the network and of waiting, in percent, and both together, which the limit is about."""
    if not shares:
        return {}
    parts = {name: shares.get(name, 0.0) for name in COMMUNICATION_SEGMENTS}
    parts["communication_and_waiting"] = sum(parts.values())
    return {f"{name}_percent": round(100 * value, 2) for name, value in parts.items()}
