"""The result of a training in a few lines: printed at the end of `make run` and by `dtrain summary`."""

from __future__ import annotations

import time
from typing import Any

from dtrain_dagster.costs.plan import PLAN
from dtrain_dagster.costs.prices import STAND_IN
from dtrain_dagster.costs.worth import worth_line
from dtrain_dagster.jobs.progress import CLAIM, REGISTRATION
from dtrain_dagster.jobs.totals import sum_presences
from dtrain_dagster.reports.kind_scores import compare_figures, has_kind_scores
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.documents.reader import warn_once
from trainer.errors import DamagedError
from trainer.rundir import EVALUATION, RESULT, RunDir
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


def summary_lines(rundir: RunDir) -> list[tuple[str, str]]:
    """Return (name, figure) pairs from the run directory of a finished job."""
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
    if (gate := evaluation.get("gate")) and evaluation["baselines"]:
        lines.append(("gate", "passed" if gate.get("passed") else f"not passed: {'; '.join(gate.get('reasons', ()))}"))
    if worth := worth_line(evaluation, paid):
        lines.append(("earned", worth))
    if registration:
        alias = f", alias {registration['alias']}" if registration.get("alias") else ""
        lines.append(("registered", f"{registration['name']} version {registration['version']}{alias}"))
    return lines


def _skill(evaluation: dict[str, Any]) -> list[tuple[str, str]]:
    model, baselines = evaluation["model"], evaluation["baselines"]
    if has_kind_scores(evaluation):
        return _skill_of_kind(evaluation)
    if model.get("nll") is None:
        return [("test loss", f"{model['loss']:.5g}")]
    best = min(
        (name for name in baselines if baselines[name].get("nll") is not None), key=lambda n: baselines[n]["nll"]
    )
    return [
        ("test NLL", f"{model['nll']:.4f}; best baseline {best} {baselines[best]['nll']:.4f} (lower is better)"),
        ("coverage", f"{model['coverage_90']:.1%} of the test windows inside the 90 % interval"),
    ]


def _skill_of_kind(evaluation: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the figures of rows and of tokens, beside those of each baseline; the first is what is compared."""
    lines = [("test loss", f"{evaluation['model']['loss']:.5g}")]
    for figure in compare_figures(evaluation):
        others = ", ".join(f"{name} {value:.4g}" for name, value in figure.baselines.items())
        lines.append((f"test {figure.name}", f"{figure.model:.4g}" + (f" ({others})" if others else "")))
    if text := (evaluation.get("sample") or {}).get("text"):
        lines.append(("sample", text))
    return [*lines, *(("note", note) for note in evaluation["notes"])]
