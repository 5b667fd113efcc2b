"""Two to eight runs laid over each other: their losses over steps, samples or dollars, and what they differ in.

`overlay` reads open jobs; everything else here is pure. Only settings that differ are shown; results are all shown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dtrain_dagster.costs.plan import PLAN
from dtrain_dagster.costs.prices import PriceError
from dtrain_dagster.costs.tracker import CostTracker, NodeCost
from dtrain_dagster.dashboard.job_account import launched_usage
from dtrain_dagster.dashboard.job_board import OpenJob
from dtrain_dagster.dashboard.job_settings import setting_text
from dtrain_dagster.dashboard.tracks import Row, is_number
from dtrain_dagster.monitoring.learning import Evaluation
from dtrain_dagster.settings.tiers import Tier
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.documents.presences import stale_seconds
from trainer.printable import visible
from trainer.rundir import JOB, LAUNCH, RESULT
from trainer.secrets.redaction import redact

LEAST_RUNS, MOST_RUNS = 2, 8
MOST_POINTS = 400
"""The most points of a curve; beyond, neighbours are merged into their means."""
TEST, LAST = "test: ", ("steps", "took", "dollars")
"""The first letters of metrics of the test split, and the results that stand below them. That a run was shorter or
cheaper does not make it the better one: of these none is marked."""
MOST_TEXT = 120
LEFT_OUT = ("job_id", "run_dir", "schema_version", "tracking.", "dataset.uri", "training.master_", "training.tls.")
"""Fields of ``job.json`` that name a job or a place, and decide nothing of its result."""
LOWER, HIGHER = -1, 1
RESULTS: tuple[tuple[str, int], ...] = (
    ("loss", LOWER), ("nll", LOWER), ("pinball", LOWER), ("mse_to_zero", LOWER), ("rank_ic", HIGHER),
    ("balanced_accuracy", HIGHER), ("coverage_90", 0),
)  # fmt: skip
"""Metrics of the test split that come first, and which of two values is the better one."""


def overlay(jobs: Sequence[OpenJob], tier: Tier) -> dict[str, Any]:
    """Return the data of the overlay's page. ``tier`` sets the price of a job without a plan."""
    now = time.time()
    names = (JOB, LAUNCH, RESULT, PLAN)
    documents = [{name: redact(job.rundir.read_json(name) or {}) for name in names} for job in jobs]
    runs = [_run(job, found, tier, now) for job, found in zip(jobs, documents, strict=True)]
    return {
        "runs": runs,
        "settings": differing([settings_of(found[JOB], found[LAUNCH]) for found in documents]),
        "results": results([_results_of(job, found[RESULT]) for job, found in zip(jobs, documents, strict=True)]),
        "live": any(job.row.running for job in jobs),
    }


def _run(job: OpenJob, found: Mapping[str, Mapping[str, Any]], tier: Tier, now: float) -> dict[str, Any]:
    with job.lock:
        tracks, nodes = job.dashboard.tracks, list(job.nodes)
        curves = {name: list(tracks[name].rows) if name in tracks else [] for name in ("steps", "evaluations")}
    usage = launched_usage(nodes, found[LAUNCH], job.row.running, now, stale_seconds(job.rundir.storage))
    try:
        paid = CostTracker("", usage, found[PLAN].get("tier", tier)).nodes
    except (PriceError, ValueError):
        paid = ()
    each = samples_per_step(found[RESULT], found[JOB].get("training") or {})
    training, validation = (curve(curves[name], each, paid) for name in ("steps", "evaluations"))
    return {
        "id": job.row.job_id,
        "state": job.row.state,
        "training": training,
        "validation": validation,
        "words": curve_words(job.row.job_id, training, job.dashboard.best_evaluation),
    }


def curve(rows: Sequence[Row], samples_each: float | None, paid: Sequence[NodeCost]) -> dict[str, list[float]]:
    """Return a curve of a loss: columns of equal length, those that are known of ``step``, ``samples``, ``usd`` and
    ``loss``. ``samples_each``: samples of a step. ``paid``: what its nodes cost when. Pure."""
    known = thinned([row for row in rows if {"step", "time", "loss"} <= row.keys()])
    columns = {"step": [row["step"] for row in known], "loss": [row["loss"] for row in known]}
    if samples_each is not None:
        columns["samples"] = [row["step"] * samples_each for row in known]
    if paid:
        columns["usd"] = usd_until(paid, [row["time"] for row in known])
    return {name: [float(f"{value:.7g}") for value in values] for name, values in columns.items()}


def thinned(rows: Sequence[Row], most: int = MOST_POINTS) -> list[Row]:
    """Return at most so many rows: means of neighbours, each at the place of its last one. Pure."""
    stride = math.ceil(len(rows) / most) if rows else 1
    if stride == 1:
        return list(rows)
    parts = [rows[at : at + stride] for at in range(0, len(rows), stride)]
    return [{**part[-1], "loss": sum(row["loss"] for row in part) / len(part)} for part in parts]


def usd_until(paid: Sequence[NodeCost], times: Sequence[float]) -> list[float]:
    """Return the dollars that these nodes have cost until each of these moments: Unix seconds, in any order. Pure."""
    changes = sorted(
        change
        for node in paid
        for change in (
            (node.started_at, node.nano_usd_per_hour / 3.6e12),
            (node.ended_at, -node.nano_usd_per_hour / 3.6e12),
        )
    )
    found, spent, rate, since, place = [0.0] * len(times), 0.0, 0.0, 0.0, 0
    for index in sorted(range(len(times)), key=lambda index: times[index]):
        while place < len(changes) and changes[place][0] <= times[index]:
            at, more = changes[place]
            spent, rate, since, place = spent + rate * (at - since), rate + more, at, place + 1
        found[index] = max(0.0, spent + rate * (times[index] - since))
    return found


def samples_per_step(result: Mapping[str, Any], training: Mapping[str, Any]) -> float | None:
    """Return the samples of an optimizer step: as counted at the end, else by the settings. None where neither tells.
    Pure."""
    seen, steps = result.get("samples_seen"), result.get("steps")
    if is_number(seen) and is_number(steps) and seen and steps:
        return float(seen / steps)
    names = ("world_size", "batch_size_per_gpu", "gradient_accumulation_steps")
    factors = [training.get(name) for name in names]
    return float(math.prod(factors)) if all(map(is_number, factors)) else None  # type: ignore[arg-type]


def curve_words(job_id: str, training: Mapping[str, list[float]], best: Evaluation | None) -> str:
    """Return a sentence that tells of a run's curves to those who do not see them. ``best``: its best evaluation, which
    a curve of merged neighbours has no more. Pure."""
    told = []
    if training["loss"]:
        first, last = training["loss"][0], training["loss"][-1]
        told.append(f"training loss from {first:.4g} to {last:.4g} at step {training['step'][-1]:,.0f}")
    if best is not None:
        told.append(f"best validation loss {best.loss:.4g} at step {best.step:,}")
    return f"{job_id}: {'; '.join(told) or 'no loss was reported yet'}."


def settings_of(job: Mapping[str, Any], launch: Mapping[str, Any]) -> dict[str, str]:
    """Return a job's settings by their dotted names, as text. Pure."""
    found = {name: text for name, text in _flat(job).items() if not name.startswith(LEFT_OUT)}
    bought = {"nodes": "node_count", "processes per node": "processes_per_node", "SKU": "sku", "tier": "tier"}
    return found | {
        name: setting_text(launch[field], MOST_TEXT) for name, field in bought.items() if launch.get(field) is not None
    }


def differing(settings: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return those settings in which these jobs differ, by name, with a value for each job; "" where a job has none.
    Pure."""
    names = sorted(set().union(*settings))
    rows = [(name, [item.get(name, "") for item in settings]) for name in names]
    return [{"name": name, "values": values} for name, values in rows if len(set(values)) > 1]


def results(found: Sequence[Mapping[str, tuple[float | None, str, int]]]) -> list[dict[str, Any]]:
    """Return the results of these jobs, with a text for each job and the places of the best ones.

    ``found``: of each job by name the value, its text, and whether a lower or a higher one is better. Pure.
    """
    names = list(dict.fromkeys(name for item in found for name in item))
    names.sort(key=lambda name: 1 if name.startswith(TEST) else 2 if name in LAST else 0)
    rows = []
    for name in names:
        values = [item.get(name, (None, "–", 0)) for item in found]
        known = [value for value, _, _ in values if value is not None]
        better = next((better for _, _, better in values if better), 0)
        best = (min(known) if better == LOWER else max(known)) if better and len(set(known)) > 1 else None
        places = [place for place, (value, _, _) in enumerate(values) if best is not None and value == best]
        rows.append({"name": name, "values": [text for _, text, _ in values], "best": places})
    return rows


def _results_of(job: OpenJob, result: Mapping[str, Any]) -> dict[str, tuple[float | None, str, int]]:
    row, test = job.row, result.get("test") or {}
    told, seen = result.get("best_valid_loss"), job.dashboard.best_evaluation
    best = told if is_number(told) else seen.loss if seen else None
    ended = row.ended_at if not row.running else time.time()
    took = row.seconds if row.seconds is not None else ended - row.started_at if ended and row.started_at else None
    found: dict[str, tuple[float | None, str, int]] = {"state": (None, row.state, 0)}
    found["best validation loss"] = _figure(best, LOWER)
    directions = dict(RESULTS)
    for name in [*directions, *(name for name in test if name not in directions)]:
        if is_number(test.get(name)):
            found[f"{TEST}{visible(str(name)).replace('_', ' ')}"] = _figure(test[name], directions.get(name, 0))
    found["steps"] = (None, f"{row.step:,}" if row.step is not None else "–", 0)
    found["took"] = (took, format_duration(took), 0) if took is not None else (None, "–", 0)
    found["dollars"] = (job.cost.with_probes, dollars(job.cost.with_probes), 0) if job.cost else (None, "–", 0)
    return found


def _figure(value: Any, better: int) -> tuple[float | None, str, int]:
    return (float(value), f"{value:.4f}", better) if is_number(value) else (None, "–", better)


def _flat(document: Mapping[str, Any], place: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in document.items():
        whole = f"{place}{name}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{whole}.")
        else:
            found[whole] = setting_text(value, MOST_TEXT)
    return found
