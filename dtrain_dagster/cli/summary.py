"""The result of a training in a few lines: printed at the end of `make run` and by `dtrain summary`."""

from __future__ import annotations

import time
from typing import Any

from dtrain_dagster.costs.plan import PLAN
from dtrain_dagster.costs.prices import STAND_IN, price_words
from dtrain_dagster.costs.worth import worth_line
from dtrain_dagster.jobs.progress import CLAIM, REGISTRATION
from dtrain_dagster.jobs.totals import LaunchTotals, sum_presences
from dtrain_dagster.reports.kind_scores import compare_figures, has_kind_scores
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.documents.reader import warn_once
from trainer.errors import DamagedError
from trainer.rundir import EVALUATION, LAUNCH, RESULT, RunDir
from trainer.storage.open import open_storage


def latest_job(settings: Settings) -> RunDir | None:
    """Return the job that most recently became an asset, None if there is none."""
    newest: tuple[float, RunDir] | None = None
    for name in open_storage(settings.jobs_uri).list():
        rundir = RunDir(f"{settings.jobs_uri}/{name}")
        try:
            claim = rundir.read_json(CLAIM)
        except (DamagedError, OSError) as error:  # of one job: the others are looked at
            warn_once(f"{name} is left out: {error}")
            continue
        if claim and (newest is None or claim["claimed_at"] > newest[0]):
            newest = (claim["claimed_at"], rundir)
    return newest[1] if newest else None


def summary_lines(rundir: RunDir, totals: LaunchTotals | None = None, price: str = "") -> list[tuple[str, str]]:
    """Return (name, figure) pairs from the run directory of a finished job. ``totals``: what its nodes took and cost,
    and ``price``: what these dollars are, for a job of which no report says so."""
    result = rundir.read_json(RESULT) or {}
    evaluation = rundir.read_json(EVALUATION) or {}
    plan = rundir.read_json(PLAN)
    cost = rundir.read_json("reports/cost_breakdown.json")
    registration = rundir.read_json(REGISTRATION)
    lines = [
        ("job", rundir.uri.rsplit("/", 1)[-1]),
        ("trained", f"{result['steps']} steps on {result['world_size']} ranks"),
    ]
    if nodes := rundir.nodes():
        took = sum_presences(nodes, running=False, now=time.time())
        lines.append(("took", f"{took.words}; {took.node_hours_words}"))
    else:  # it ran without a cluster, and nobody recorded when its nodes were there
        lines.append(("took", f"{format_duration(result['train_seconds'])} of training"))
    lines += _skill(evaluation)
    paid = None
    if cost and plan:
        probe = cost.get("probe_usd", 0.0)
        training = cost.get("training_usd", cost["metrics"]["total_cost_usd"])
        expected, words = plan["estimate"]["usd"]["expected"], plan.get("price_words", STAND_IN)
        last = ((cost.get("launches") or {}).get("last") or {}).get("usd")
        of_which = f", of which the last launch {dollars(last)}" if last is not None else ""
        more = f"; with its probe {dollars(training + probe)}" if probe else ""
        paid = training + probe
        lines.append(("cost", f"{dollars(training)}{of_which}, estimated {dollars(expected)}{more} ({words})"))
    elif totals is not None and totals.usd is not None:
        paid = totals.usd
        lines.append(("cost", f"{dollars(paid)} ({price})"))
    if (gate := evaluation.get("gate")) and evaluation["baselines"]:
        lines.append(("gate", "passed" if gate.get("passed") else f"not passed: {'; '.join(gate.get('reasons', ()))}"))
    if worth := worth_line(evaluation, paid):
        lines.append(("earned", worth))
    if registration:
        alias = f", alias {registration['alias']}" if registration.get("alias") else ""
        lines.append(("registered", f"{registration['name']} version {registration['version']}{alias}"))
    return lines


def print_summary(settings: Settings, rundir: RunDir) -> None:
    """Print the summary of a finished job."""
    from dtrain_dagster.cli.common import console
    from dtrain_dagster.cli.terminal import pairs_table

    console().print(pairs_table(priced_summary(settings, rundir)), highlight=False)


def priced_summary(settings: Settings, rundir: RunDir) -> list[tuple[str, str]]:
    """Return `summary_lines` with the dollars of the job's nodes, whether or not a report has them."""
    from dtrain_dagster.cli.common import cluster_of

    price = price_words(cluster_of(settings)[0].sku, settings.kind.buys_nodes)
    return summary_lines(rundir, _totals(settings, rundir), price)


def summary_document(settings: Settings, rundir: RunDir) -> dict[str, Any]:
    """Return the result of a finished job for JSON, with the fields of `dtrain_dagster.cli.json_fields.SUMMARY`."""
    result, evaluation = rundir.read_json(RESULT) or {}, rundir.read_json(EVALUATION) or {}
    totals = _totals(settings, rundir)
    gate = evaluation.get("gate") if evaluation.get("baselines") else None
    registration = rundir.read_json(REGISTRATION)
    names = ("name", "version", "alias")
    return {
        "job": rundir.uri.rsplit("/", 1)[-1],
        "figures": dict(priced_summary(settings, rundir)),
        "steps": result["steps"],
        "epochs": result.get("epochs"),
        "world_size": result["world_size"],
        "seconds": totals.seconds,
        "node_hours": totals.node_hours,
        "usd": totals.usd,
        "test": evaluation.get("model", {}),
        "baselines": evaluation.get("baselines", {}),
        "gate_passed": gate.get("passed") if gate else None,
        "registered": {name: registration.get(name) for name in names} if registration else None,
    }


def _totals(settings: Settings, rundir: RunDir) -> LaunchTotals:
    from dtrain_dagster.cli.job_facts import read_totals

    return read_totals(settings, rundir, rundir.read_json(LAUNCH) or {}, running=False)


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
