"""What is known of a job beside `dtrain_dagster.jobs.facts`: its nodes, how far it has come, the time left, and the
result of one that has succeeded; for a terminal, and for ``--json``, which say the same."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from dtrain_dagster.cli.common import Refusal, cluster_of, console, manager_of, print_json, run_dir, say
from dtrain_dagster.cli.screen import print_fitted, state_text
from dtrain_dagster.clusters.base import JobState, JobStatus
from dtrain_dagster.clusters.exit_policy import describe_exit
from dtrain_dagster.costs.plan import PLAN
from dtrain_dagster.costs.prices import STAND_IN, price_words
from dtrain_dagster.costs.worth import is_judged, worth_line
from dtrain_dagster.jobs.facts import JobFacts, read_facts
from dtrain_dagster.jobs.progress import REGISTRATION
from dtrain_dagster.jobs.totals import LaunchTotals
from dtrain_dagster.jobs.view import JobFollower, JobView
from dtrain_dagster.monitoring.hangs import hang_verdict
from dtrain_dagster.planning.projection import TimeLeft, count_nodes, describe_training, time_left
from dtrain_dagster.reports.kind_scores import compare_figures, has_kind_scores
from dtrain_dagster.settings.cluster_kinds import tier_of
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.documents.presences import NodePresence, stale_seconds
from trainer.errors import DamagedError
from trainer.printable import visible
from trainer.rundir import EVALUATION, LAUNCH, RESULT, RunDir

SEPARATOR = " · "
"""What stands between the parts of a line of progress."""
READERS = 16
"""The number of run directories that are read in parallel."""


def facts_of(settings: Settings, status: JobStatus) -> JobFacts:
    """Return the facts on a job of this status. One that is damaged, or cannot be read now, hides no other."""
    rundir = run_dir(settings, status.job_id)
    try:
        if not status.damage:
            return read_facts(rundir, status, tier_of(settings.tiers[0]), settings.gpu_type)
    except (DamagedError, OSError) as error:
        status = replace(status, damage=str(error))
    return JobFacts(status=status, run_dir=rundir.uri)


def read_nodes(rundir: RunDir, now: float, skip_damaged: bool = False) -> list[dict[str, Any]]:
    """Return the incarnations of nodes that a job has, and has had, for JSON. ``state``: there, silent, or how it
    ended."""
    name, stale = rundir.uri.rpartition("/")[2], stale_seconds(rundir.storage)
    return [
        {
            "job": name,
            "launch": node.launch,
            "node": node.node_id,
            "incarnation": node.incarnation,
            "host": node.host or None,
            "state": _state_of(node, now, stale),
            "started_at": node.started_at,
            "ended_at": node.ended_at,
            "exit_codes": node.exit_codes,
            "seconds": node.seconds(now - node.clock_jump_seconds),
            "note": _note_of(node),
        }
        for node in rundir.nodes(skip_damaged=skip_damaged)
    ]


def _state_of(node: NodePresence, now: float, stale: float) -> str:
    """Return how a node stands. One that is silent for more than ``stale`` seconds is not known to be there."""
    if node.ended_at is not None:
        return ", ".join(map(describe_exit, dict.fromkeys(node.exit_codes))) or "ended"
    silent = now - node.heard_at(now)
    return f"silent for {format_duration(silent)}" if silent > stale else "there" if node.kept_since is None else "kept"


def _note_of(node: NodePresence) -> str | None:
    if node.preflight:
        return f"failed its pre-flight: {node.preflight}"
    if node.kept_until is not None:
        return f"kept until {time_of(node.kept_until)}"
    return None if node.leaves_at is None else f"leaves by {time_of(node.leaves_at)}: {node.leaves_because}"


def time_of(seconds: float | None, with_seconds: bool = True) -> str:
    """Return the local time of Unix ``seconds``, "" for None."""
    form = "%m-%d %H:%M:%S" if with_seconds else "%m-%d %H:%M"
    return "" if seconds is None else time.strftime(form, time.localtime(seconds))


def list_facts(settings: Settings, statuses: Sequence[JobStatus]) -> list[JobFacts]:
    """Return the facts on these jobs."""
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(lambda status: facts_of(settings, status), statuses))


def read_plan(rundir: RunDir) -> Mapping[str, Any]:
    """Return the plan that the time left rests on; an empty one where there is none, or it is damaged: others refuse
    the job for it, and here a figure is missing."""
    with suppress(DamagedError):
        return rundir.read_json(PLAN) or {}
    return {}


def left_of(status: JobStatus, view: JobView, plan: Mapping[str, Any]) -> TimeLeft | None:
    """Return the time left of a job, without a plan to its last step; None where it is not known, and for a job that
    has ended."""
    return None if status.state.is_final or not view.reports else time_left(view, plan, time.time())


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCourse:
    """How far a job has come, as one look at its events tells it."""

    view: JobView
    left: TimeLeft | None = None

    @property
    def has_events(self) -> bool:
        """Return whether there was anything to tell it by."""
        return self.view != JobView(nodes_alive=self.view.nodes_alive)


def read_course(status: JobStatus, rundir: RunDir) -> JobCourse:
    """Return how far a job of this status has come. Of one that is damaged nothing is known."""
    follower = JobFollower(rundir, JobView(nodes_alive=status.nodes_alive))
    if status.damage:
        return JobCourse(view=follower.view)
    for _ in follower.read():
        continue
    return JobCourse(view=follower.view, left=left_of(status, follower.view, read_plan(rundir)))


def format_progress(
    progress: JobView, total_steps: int | None, left: TimeLeft | None = None, state: JobState | None = None
) -> str:
    """Return phase, step, epoch, time left, loss, speed and nodes in one line, as far as they are known. ``state``: of
    the job, as `describe_training` has it. Pure."""
    nodes = [] if state is not None and state.is_final else [count_nodes(progress.nodes_alive)]
    return SEPARATOR.join([*describe_training(progress, total_steps, left, state), *nodes])


def so_far(facts: JobFacts) -> str:
    """Return what a job took and cost over all launches, in a line: ``12 s; 0.0066 node-hours; $0.0203``. Pure."""
    totals = facts.totals
    if totals is None or not totals.launches:
        return "" if facts.seconds is None else format_duration(facts.seconds)
    return f"{totals.words}; {totals.node_hours_words}" + ("" if facts.usd is None else f"; {dollars(facts.usd)}")


def status_document(facts: JobFacts, rundir: RunDir, course: JobCourse) -> dict[str, Any]:
    """Return how a job stands for JSON."""
    view, left = course.view, course.left
    presences = [] if facts.status.damage else read_nodes(rundir, time.time())
    return {
        **facts.document(),
        "phase": describe_training(view, view.total_steps, None, facts.status.state)[0],
        "total_steps": view.total_steps,
        "epoch": view.epoch or None,
        "valid_loss": view.valid_loss,
        "samples_per_second": None if facts.status.state.is_final else view.samples_per_second,
        "eta_seconds": left.seconds if left else None,
        "eta_has_finish": left.has_finish if left else None,
        "presences": presences,
        "studio_url": None if facts.status.damage else (rundir.read_json(LAUNCH) or {}).get("studio_url"),
    }


def has_result(rundir: RunDir) -> bool:
    """Return whether a job is a training that has succeeded, of which there is a summary."""
    return (rundir.read_json(RESULT) or {}).get("status") == "succeeded" and rundir.storage.exists(EVALUATION)


def summary_lines(rundir: RunDir, totals: LaunchTotals | None = None, price: str = "") -> list[tuple[str, str]]:
    """Return (name, figure) pairs from the run directory of a finished job. ``totals``: what its nodes took and cost,
    and ``price``: what these dollars are, for a job of which no report says so."""
    result = rundir.read_json(RESULT) or {}
    evaluation = rundir.read_json(EVALUATION) or {}
    plan = rundir.read_json(PLAN)
    cost = rundir.read_json("reports/cost_breakdown.json")
    registration = rundir.read_json(REGISTRATION)
    took = f"{format_duration(result['train_seconds'])} of training"  # where nobody recorded when its nodes were there
    if totals is not None and totals.launches:
        took = f"{totals.words}; {totals.node_hours_words}"
    trained = f"{result['steps']} steps on {result['world_size']} ranks"
    lines = [("job", rundir.uri.rsplit("/", 1)[-1]), ("trained", trained), ("took", took), *_skill(evaluation)]
    paid = None
    if cost and plan:
        probe = cost.get("probe_usd", 0.0)
        training = cost.get("training_usd", cost["metrics"]["total_cost_usd"])
        expected, words = plan["estimate"]["usd"]["expected"], plan.get("price_words", STAND_IN)
        last = ((cost.get("launches") or {}).get("last") or {}).get("usd")
        of_which = f", of which the last launch {dollars(last)}" if last is not None else ""
        paid = cost.get("total_usd", training + probe)  # not the sum of two figures that were each rounded
        more = f"; with its probe {dollars(paid)}" if probe else ""
        lines.append(("cost", f"{dollars(training)}{of_which}, estimated {dollars(expected)}{more} ({words})"))
    elif totals is not None and totals.usd is not None:
        paid = totals.usd
        lines.append(("cost", f"{dollars(paid)} ({price})"))
    if (gate := evaluation.get("gate")) and is_judged(evaluation):
        lines.append(("gate", "passed" if gate.get("passed") else f"not passed: {'; '.join(gate.get('reasons', ()))}"))
    if worth := worth_line(evaluation, paid):
        lines.append(("earned", worth))
    if registration:
        alias = f", alias {registration['alias']}" if registration.get("alias") else ""
        lines.append(("registered", f"{registration['name']} version {registration['version']}{alias}"))
    return lines


def priced_summary(settings: Settings, rundir: RunDir) -> list[tuple[str, str]]:
    """Return `summary_lines` with the dollars of the job's nodes, whether or not a report has them."""
    status = JobStatus(job_id=rundir.uri.rpartition("/")[2], state=JobState.SUCCEEDED)
    return summary_lines(rundir, facts_of(settings, status).totals, price_of_cluster(settings))


def price_of_cluster(settings: Settings) -> str:
    """Return what the dollars of this cluster are, in words."""
    return price_words(cluster_of(settings)[0].sku, settings.kind.buys_nodes)


def summary_document(settings: Settings, rundir: RunDir) -> dict[str, Any]:
    """Return the result of a finished job for JSON."""
    result, evaluation = rundir.read_json(RESULT) or {}, rundir.read_json(EVALUATION) or {}
    gate = evaluation.get("gate") if is_judged(evaluation) else None
    registration = rundir.read_json(REGISTRATION)
    names = ("name", "version", "alias")
    return {
        "figures": dict(priced_summary(settings, rundir)),
        "steps": result["steps"],
        "epochs": result.get("epochs"),
        "world_size": result["world_size"],
        "test": evaluation.get("model", {}),
        "baselines": evaluation.get("baselines", {}),
        "gate_passed": gate.get("passed") if gate else None,
        "registered": {name: registration.get(name) for name in names} if registration else None,
    }


def _skill(evaluation: dict[str, Any]) -> list[tuple[str, str]]:
    model, baselines = evaluation["model"], evaluation["baselines"]
    if has_kind_scores(evaluation):
        return _skill_of_kind(evaluation)
    if not model:  # a dataset of one's own that is for training only
        return [("note", note) for note in evaluation["notes"]]
    if model.get("nll") is None:
        return [("test loss", f"{model['loss']:.5g}")]
    known = {name: figures["nll"] for name, figures in baselines.items() if figures.get("nll") is not None}
    best = min(known, key=lambda name: known[name], default=None)
    beside = "" if best is None else f"; best baseline {best} {known[best]:.4f} (lower is better)"
    lines = [("test NLL", f"{model['nll']:.4f}{beside}")]
    if (covered := model.get("coverage_90")) is not None:
        lines.append(("coverage", f"{covered:.1%} of the test windows inside the 90 % interval"))
    return lines


def _skill_of_kind(evaluation: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the figures of rows, beside those of each baseline; the first is what is compared."""
    lines = [("test loss", f"{evaluation['model']['loss']:.5g}")]
    for figure in compare_figures(evaluation):
        others = ", ".join(f"{name} {value:.4g}" for name, value in figure.baselines.items())
        lines.append((f"test {figure.name}", f"{figure.model:.4g}" + (f" ({others})" if others else "")))
    return [*lines, *(("note", note) for note in evaluation["notes"])]


JOB_COLUMNS = ("JOB", "STATE", "COST", "TOOK", "STARTED", "LOSS", "STEP", "NODES")
NODE_COLUMNS = ("NODE", "STATE", "FOR", "HOST", "NOTE", "FROM", "LAUNCH", "JOB")
HOST_COLUMNS = ("EXCLUDED HOST", "UNTIL", "WHY")


def print_status(console: Console, facts: JobFacts, rundir: RunDir, now: float, course: JobCourse) -> None:
    """Print the state of a job, what it took and cost so far, and when each of its nodes was present."""
    status = facts.status
    console.print(f"job {status.job_id}: ", state_text(facts.state), sep="", soft_wrap=True)
    if facts.began_at is not None:
        console.print(f"started {time_of(facts.began_at)}, {so_far(facts)}", highlight=False, soft_wrap=True)
    if course.has_events:
        text = format_progress(course.view, course.view.total_steps, course.left, status.state)
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        if course.view.hang:
            text = f"! {hang_verdict(course.view.hang)}"
            console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if nodes := read_nodes(rundir, now):
        print_nodes(console, nodes)
    studio = (rundir.read_json(LAUNCH) or {}).get("studio_url")
    why = status.message if status.message != status.state.value else ""
    for line in filter(None, (why, *status.kept, studio)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_nodes(console: Console, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each incarnation of a node: on which host and when it was present, and how it stands or left."""
    rows = []
    for node in nodes:
        number = f"{node['node']}" + (f" (incarnation {node['incarnation']})" if node["incarnation"] > 1 else "")
        times = format_duration(node["seconds"]), node["host"] or "", node["note"] or "", time_of(node["started_at"])
        rows.append((number, node["state"], *times, str(node["launch"]), node["job"]))
    print_fitted(console, NODE_COLUMNS, rows, right=("FOR", "LAUNCH"), always=3)


def show_nodes(settings: Settings, as_json: bool) -> None:
    """Print the nodes that are there, of all jobs that run, and the excluded hosts."""
    manager, now = manager_of(settings), time.time()
    record = manager.host_record()
    names = [each.job_id for each in manager.active_jobs()]
    found = [node for name in names for node in read_nodes(run_dir(settings, name), now, skip_damaged=True)]
    nodes = [node for node in found if node["ended_at"] is None]
    excluded = [] if record is None else record.excluded(now)
    if as_json:
        hosts = [{"host": each.host, "until": each.until, "why": each.why} for each in excluded]
        print_json({"nodes": nodes, "excluded_hosts": hosts})
        return
    if nodes:
        print_nodes(console(), nodes)
    else:
        say("no job runs")
    if excluded:
        say("")
        print_fitted(
            console(), HOST_COLUMNS, [(each.host, time_of(each.until), each.why) for each in excluded], always=3
        )
        say("`dtrain status --lift HOST` lifts it")


def lift_exclusion(settings: Settings, host: str) -> None:
    """Let nodes be placed on a host again. Raise `Refusal` for one that is not excluded."""
    record, now = manager_of(settings).host_record(), time.time()
    known = [] if record is None else record.excluded(now)
    if record is None or host not in {each.host for each in known}:
        others = f"; excluded are {', '.join(each.host for each in known)}" if known else "; none is"
        raise Refusal(f"host {host} is not excluded on this cluster{others}")
    record.lift(host, now)
    say(f"nodes may be placed on {host} again")


def print_jobs(console: Console, jobs: Sequence[JobFacts]) -> None:
    """Print a row for each job, and below why those that are damaged cannot be read."""
    print_fitted(
        console, JOB_COLUMNS, [_job_row(job) for job in jobs], right=("COST", "TOOK", *JOB_COLUMNS[5:]), always=3
    )
    for job in jobs:
        if job.status.damage:
            text = f"! {visible(job.status.job_id)} is damaged: {visible(job.status.damage)}"
            console.print(text, style="yellow", soft_wrap=True, highlight=False)


def _job_row(job: JobFacts) -> list[Any]:
    return [
        job.status.job_id,
        state_text(job.state),
        "" if job.usd is None else dollars(job.usd),
        "" if job.seconds is None else format_duration(job.seconds),
        time_of(job.began_at, with_seconds=False),
        "" if job.loss is None else f"{job.loss:.4f}",
        "" if job.step is None else str(job.step),
        str(job.nodes or ""),
    ]
