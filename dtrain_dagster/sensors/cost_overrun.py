"""The sensors on spending. ``cost_overrun`` reports a running job that costs more than estimated, or will, before the
bill does. ``ceilings`` tells people when the ceiling on spending is nearly used, and when it is, before a start is
refused."""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from dtrain_dagster.assets.checks import COST_CHECK
from dtrain_dagster.costs.ceilings import COMMAND, CeilingError, Stand
from dtrain_dagster.costs.plan import PLAN, PLANNED_FOR, STOCK_TRAINED
from dtrain_dagster.costs.prices import STAND_IN, alternatives_to
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.jobs.spending import FOLDER, SpendingBook
from dtrain_dagster.jobs.view import JobView, fold
from dtrain_dagster.monitoring.windows import settled, windows
from dtrain_dagster.planning.projection import THRESHOLDS, Overrun, Projection, overruns
from dtrain_dagster.planning.projection import project as project_cost
from dtrain_dagster.resources import cluster_resource, project_resource
from dtrain_dagster.settings.cluster_kinds import tier_of
from dtrain_dagster.support.formatting import dollars
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames
from dtrain_dagster.support.notify import notify_and_log
from trainer.printable import visible
from trainer.rundir import RunDir
from trainer.storage.base import Storage
from trainer.storage.open import open_storage

if TYPE_CHECKING:
    from dtrain_dagster.monitoring.strategies import Change

COST_TOLD = "cost_alerts.json"
"""The file with the cost alerts that were sent; `training_progress.TOLD` is held in memory by another process."""
OF_THE_REST = "of what is left, continued from the checkpoint:"
"""Of what savings are."""
ENOUGH_STEPS, MOST_FILES = 20, 400
"""The reports of steps that are read from the newest events, and the most files for them. A job whose steps take long
writes dozens of files, of samples, between two such reports; therefore what was read is kept from look to look."""
_READ: dict[str, tuple[JobView, float]] = {}
"""The view of each running job and the time of its newest event, by run directory, while this process lives."""


def build_cost_overrun_sensor(names: GraphNames = STOCK_NAMES) -> dg.SensorDefinition:
    """Return the sensor that fails the cost check and notifies people, once per job and threshold."""
    levels = ", ".join(f"{level:.0%}" for level in THRESHOLDS)

    @dg.sensor(
        name=names.unique("cost_overrun"),
        required_resource_keys=names.resources,
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Fails the check {COST_CHECK} of trained_checkpoint and notifies, once per job at {levels} above "
        "the estimated cost, judged by the cost so far and by the projected cost; lists what would save how much.",
    )
    def cost_overrun(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        cluster, project = cluster_resource(context, names), project_resource(context, names)
        manager, own = cluster.manager(), names.key("trained_checkpoint").to_user_string()
        before = json.loads(context.cursor or "{}")
        running = [job.job_id for job in manager.active_jobs()]
        looks, count = {}, 0
        for job_id in running:
            look = before.get(job_id) or {}
            rundir = RunDir(f"{project.jobs_uri}/{job_id}")
            try:
                plan = rundir.read_json(PLAN)
                if plan is None or plan.get(PLANNED_FOR, STOCK_TRAINED) != own:
                    continue  # nobody's, or another graph's, whose sensor judges it
                usage, told = manager.node_usage(job_id), _told(rundir)
                look = look | {"told": sorted({*look.get("told", ()), *told})}
                tracker = CostTracker(cluster.cluster_name, usage, tier_of(plan["tier"]))
                projection, due, looks[job_id] = judge_cost(rundir, plan, tracker, look)
                for item in due:
                    sentence = _sentence(job_id, item, projection)
                    told = {key: {"sentence": sentence, "at": time.time()} for key in item.covers} | told
                    looks[job_id]["told"] = sorted({*looks[job_id]["told"], *item.covers})
                    count += 1
                    context.log.warning(sentence)
                    advice = _advice(context, plan, usage, rundir, projection)
                    rest = [OF_THE_REST] if advice else []
                    body = "\n".join([sentence, *rest, *(f"- {change.text}" for change in advice)])
                    try:  # recorded now, not with the result of this tick: later steps may fail or hang
                        check = _check(job_id, item, projection, advice, plan)
                        context.instance.report_runless_asset_event(check)
                    finally:
                        notify_and_log(
                            project.notify_urls(), f"dtrain: {job_id} costs more than estimated", body, context.log
                        )
                        rundir.write_json(COST_TOLD, told)  # last: where this fails, people have still been told
            except Exception as error:  # of any kind: one job's run directory must not hide the others
                why = visible(f"{type(error).__name__}: {error}")
                context.log.warning(f"{job_id}: its cost could not be judged: {why}")
                looks.setdefault(job_id, look)
        for job_id in before.keys() - set(running):  # this sensor's: another graph's has jobs of its own there
            _READ.pop(f"{project.jobs_uri}/{job_id}", None)
        return dg.SensorResult(
            skip_reason=f"{len(running)} running job(s), " + (f"{count} alert(s)" if count else "none newly above"),
            cursor=json.dumps(looks),
        )

    return cost_overrun


def judge_cost(
    rundir: RunDir, plan: Mapping[str, Any], tracker: CostTracker, look: Mapping[str, Any]
) -> tuple[Projection, list[Overrun], dict[str, Any]]:
    """Return a job's projection, the overruns to report, and the state for the next look, as JSON."""
    view, read = _READ.get(rundir.uri, (JobView(), 0.0))
    events = recent_events(rundir, after=read)
    view = fold(view, events)
    _READ[rundir.uri] = view, events[-1]["time"] if events else read
    projection = project_cost(tracker, plan, view)
    due = overruns(projection, look["told"], look.get("projected"))
    over = projection.over_at_end if projection.counts else None
    return projection, due, {"told": look["told"], "projected": over}


def _advice(
    context: dg.SensorEvaluationContext,
    plan: Mapping[str, Any],
    usage: Sequence[NodeUsage],
    rundir: RunDir,
    projection: Projection,
) -> "tuple[Change, ...]":
    """Return what would save money; empty where that cannot be computed, for the alert must not wait for it."""
    from dtrain_dagster.planning.optimizer import rest_of, savings

    try:
        events = recent_events(rundir)
        table, training = alternatives_to(usage[-1].sku), (plan.get("job") or {}).get("training") or {}
        rest = rest_of(usage, table, projection, plan, _READ[rundir.uri][0])
        return savings(rest, settled(windows(events)), events, training, table, datetime.now(UTC).date())
    except Exception as error:  # of any kind: events and plans of other versions, unknown prices
        context.log.warning(f"possible savings cannot be computed: {type(error).__name__}: {error}")
        return ()


def recent_events(rundir: RunDir, after: float = 0.0) -> list[dict[str, Any]]:
    """Return rank 0's latest events later than ``after``, in order of time; however long the job is, a few files."""
    found: list[dict[str, Any]] = []
    for events in rundir.newest_events(MOST_FILES):
        found += (event for event in events if event["time"] > after)
        is_enough = sum(event["kind"] == "step" for event in found) >= ENOUGH_STEPS
        if is_enough or any(event["time"] <= after for event in events):
            break
    return sorted(found, key=lambda event: event["time"])


def _sentence(job_id: str, item: Overrun, projection: Projection) -> str:
    assert projection.estimated is not None
    spent, estimated = dollars(projection.so_far), dollars(projection.estimated)
    if item.kind == "actual":
        return f"{job_id} has cost {spent}, {item.fraction:.0%} above the estimate of {estimated}, and goes on"
    assert projection.at_end is not None
    end = dollars(projection.at_end.expected)
    return f"{job_id} will cost {end}, {item.fraction:.0%} above the estimate of {estimated}; {spent} so far"


def _check(
    job_id: str, item: Overrun, projection: Projection, advice: "tuple[Change, ...]", plan: Mapping[str, Any]
) -> dg.AssetCheckEvaluation:
    from dtrain_dagster.monitoring.strategies import change_table

    words, table = plan.get("price_words", STAND_IN), change_table(advice)
    metadata: dict[str, Any] = {
        "job_id": job_id,
        "kind": item.kind,
        "threshold_percent": round(100 * item.threshold, 1),
        "over_estimate_percent": round(100 * item.fraction, 1),
        "cost_so_far": f"{dollars(projection.so_far)} ({words})",
        "cost_so_far_usd": projection.so_far,
        "estimated_usd": projection.estimated,
        "what_to_do": dg.MarkdownMetadataValue(f"{OF_THE_REST}\n\n{table}" if advice else table),
        "or": "let it finish if the result is worth it, or terminate the run: the checkpoint stays",
    }
    if projection.at_end is not None:
        metadata["projected_usd"] = projection.at_end.expected
        metadata["projected"] = f"{dollars(projection.at_end.low)} to {dollars(projection.at_end.high)}"
    return dg.AssetCheckEvaluation(
        asset_key=dg.AssetKey.from_user_string(plan.get(PLANNED_FOR, STOCK_TRAINED)),
        check_name=COST_CHECK,
        passed=False,
        severity=dg.AssetCheckSeverity.WARN,
        description=_sentence(job_id, item, projection),
        metadata=metadata,
    )


def _told(rundir: RunDir) -> dict[str, Any]:
    """Return the sentence and time of each reported `Overrun` by its key; empty where the record is damaged."""
    try:
        told = rundir.read_json(COST_TOLD)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


LEVELS = (80, 100)
"""Percent of the ceiling at which people are told, once each per month."""
EVERY_SECONDS = 120


def build_ceilings_sensor(names: GraphNames = STOCK_NAMES) -> dg.SensorDefinition:
    """Return the sensor that tells people that the ceiling is nearly used, once per month and level."""
    levels = " and ".join(f"{level} %" for level in LEVELS)

    @dg.sensor(
        name=names.unique("ceilings"),
        required_resource_keys=names.resources,
        minimum_interval_seconds=EVERY_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Notifies once per month at {levels} of the ceiling on spending (`{COMMAND}`), counting what was "
        "spent and what running jobs were promised. It ends nothing.",
    )
    def ceilings(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        cluster, project = cluster_resource(context, names), project_resource(context, names)
        try:
            stand = SpendingBook(Path(project.home), project.jobs_uri, cluster.first_tier).judge()
        except CeilingError as error:
            return dg.SkipReason(str(error))
        if stand is None:
            return dg.SkipReason("no ceiling is set")
        notices, share = open_storage(f"{project.home}/{FOLDER}/notices"), f"{stand.total / stand.limit:.0%}"
        firsts = [_is_first(notices, key) for key in keys_due(stand)]  # nobody has to be told of a lower level any more
        if is_due := bool(firsts) and firsts[-1]:
            what = "nothing new is started" if stand.total >= stand.limit else "a start that would exceed it is refused"
            text = f"{share} of the ceiling of {stand.text}{stand.most}; {what}; raise it: {COMMAND} --per-month AMOUNT"
            context.log.warning(text)
            body = "\n- ".join([text, *stand.not_counted])
            title = f"dtrain: {share} of the ceiling per month is used"
            notify_and_log(project.notify_urls(), title, body, context.log)
        return dg.SkipReason(f"{share} of the ceiling per month is used; {int(is_due)} notice(s)")

    return ceilings


def _is_first(notices: Storage, key: str) -> bool:
    """Return whether nobody was told of this before, on any graph of the home; from now on somebody was."""
    try:
        notices.create(key, b"")
    except FileExistsError:
        return False
    return True


def keys_due(stand: Stand) -> list[str]:
    """Return the keys of the notices that the use of the ceiling is worth, the lowest level first. Pure."""
    return [f"{stand.month}-per_month-all-{level}" for level in LEVELS if stand.total * 100 >= level * stand.limit]
