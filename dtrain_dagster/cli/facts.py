"""What is known of a job beside `dtrain_dagster.jobs.facts`: its nodes, how far it has come, the time left, and the
result of one that has succeeded; for a terminal, and for ``--json``, which say the same."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from dtrain_dagster.cli.common import TROUBLE, cluster_of, manager_of, run_dir, say
from dtrain_dagster.clusters.base import JobState, JobStatus
from dtrain_dagster.clusters.exit_policy import describe_exit
from dtrain_dagster.costs.plan import PLAN
from dtrain_dagster.costs.prices import STAND_IN, price_words
from dtrain_dagster.costs.worth import is_judged, worth_line
from dtrain_dagster.jobs.facts import JobFacts, read_facts
from dtrain_dagster.jobs.progress import REGISTRATION
from dtrain_dagster.jobs.totals import LaunchTotals
from dtrain_dagster.jobs.view import JobFollower, JobView
from dtrain_dagster.planning.projection import TimeLeft, count_nodes, describe_training, time_left
from dtrain_dagster.settings.cluster_kinds import tier_of
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.documents.presences import NodePresence, stale_seconds
from trainer.errors import DamagedError
from trainer.rundir import EVALUATION, LAUNCH, RESULT, RunDir
from trainer.spec import WINDOWS

SEPARATOR = " · "
"""What stands between the parts of a line of progress."""
FIGURES = ("log_loss", "rmse", "accuracy", "ece", "r2", "perplexity", "bits_per_byte")
"""The test figures of rows that people compare, as far as there are some; and those of tokens, of older versions."""


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


def format_progress(progress: JobView, left: TimeLeft | None = None, state: JobState | None = None) -> str:
    """Return phase, step, epoch, time left, loss, speed and nodes in one line, as far as they are known. ``state``: of
    the job, as `describe_training` has it. Pure."""
    nodes = [] if state is not None and state.is_final else [count_nodes(progress.nodes_alive)]
    return SEPARATOR.join([*describe_training(progress, progress.total_steps, left, state), *nodes])


def describe_job(
    facts: JobFacts, course: JobCourse, checkpoint: tuple[str, int] | None = None, price: str = ""
) -> list[str]:
    """Return how a job stands, what it took and cost, and how far it has come, in lines. ``checkpoint``: the name and
    step of its latest; ``price``: what its dollars are. Pure."""
    status, view, totals = facts.status, course.view, facts.totals
    lines = [f"job {facts.job_id}: {facts.state}"]
    if totals is not None and totals.launches:
        paid = "" if facts.usd is None else f"; {dollars(facts.usd)} ({price})"
        lines.append(f"so far: {totals.words}; {totals.node_hours_words}{paid}")
    elif facts.seconds is not None:
        lines.append(f"so far: {format_duration(facts.seconds)}")
    if not course.has_events:
        return lines
    saved = ""
    if status.state.is_final and status.state != "succeeded":
        saved = f"; its checkpoint is of step {checkpoint[1]}" if checkpoint else "; it has no checkpoint yet"
    view = replace(view, step=max(view.step, facts.step or 0))  # not each step is reported
    return [*lines, format_progress(view, course.left, status.state) + saved]


def say_how_it_stands(settings: Settings, job_id: str) -> bool:
    """Print `describe_job`, where it can be read. Return whether the job is known to have ended."""
    with suppress(*TROUBLE):
        rundir, facts = run_dir(settings, job_id), facts_of(settings, manager_of(settings).job_status(job_id))
        course = read_course(facts.status, rundir)
        say(*describe_job(facts, course, rundir.latest_checkpoint(), price_of_cluster(settings)), err=True)
        return facts.status.state.is_final
    return False


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
    result, evaluation = rundir.read_json(RESULT) or {}, rundir.read_json(EVALUATION) or {}
    took = f"{format_duration(result['train_seconds'])} of training"  # where nobody recorded when its nodes were there
    if totals is not None and totals.launches:
        took = f"{totals.words}; {totals.node_hours_words}"
    trained = f"{result['steps']} steps on {result['world_size']} ranks"
    lines = [("job", rundir.uri.rsplit("/", 1)[-1]), ("trained", trained), ("took", took), *_skill(evaluation)]
    paid = totals.usd if totals is not None else None
    told = None if paid is None else f"{dollars(paid)} ({price})"
    if (cost := rundir.read_json("reports/cost_breakdown.json")) and (plan := rundir.read_json(PLAN)):
        probe = cost.get("probe_usd", 0.0)
        training = cost.get("training_usd", cost["metrics"]["total_cost_usd"])
        paid = cost.get("total_usd", training + probe)  # not the sum of two figures that were each rounded
        more = f"; with its probe {dollars(paid)}" if probe else ""
        expected, words = plan["estimate"]["usd"]["expected"], plan.get("price_words", STAND_IN)
        told = f"{dollars(training)}, estimated {dollars(expected)}{more} ({words})"
    lines += [("cost", told)] if told else []
    if (gate := evaluation.get("gate")) and is_judged(evaluation):
        lines.append(("gate", "passed" if gate.get("passed") else f"not passed: {'; '.join(gate.get('reasons', ()))}"))
    if worth := worth_line(evaluation, paid):
        lines.append(("earned", worth))
    if registration := rundir.read_json(REGISTRATION):
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


def _skill(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures of a model on the test split, beside those of its baselines."""
    model, notes = evaluation["model"], [("note", note) for note in evaluation["notes"]]
    if evaluation.get("kind", WINDOWS) != WINDOWS:
        lines = [("test loss", f"{model['loss']:.5g}")]
        for name in (figure for figure in FIGURES if model.get(figure) is not None):
            rows = evaluation["baselines"].items()
            others = ", ".join(f"{other} {row[name]:.4g}" for other, row in rows if row.get(name) is not None)
            lines.append((f"test {name}", f"{model[name]:.4g}" + (f" ({others})" if others else "")))
        return lines + notes
    if not model:  # a dataset of one's own that is for training only
        return notes
    if model.get("nll") is None:
        return [("test loss", f"{model['loss']:.5g}")]
    known = {name: row["nll"] for name, row in evaluation["baselines"].items() if row.get("nll") is not None}
    best = min(known, key=lambda name: known[name], default=None)
    beside = "" if best is None else f"; best baseline {best} {known[best]:.4f} (lower is better)"
    lines = [("test NLL", f"{model['nll']:.4f}{beside}")]
    if (covered := model.get("coverage_90")) is not None:
        lines.append(("coverage", f"{covered:.1%} of the test windows inside the 90 % interval"))
    return lines
