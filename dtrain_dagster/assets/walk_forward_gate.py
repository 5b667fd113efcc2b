"""The walk forward as a gate: whether a model may be champion by the report of its kind, and where that report is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg

from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.settings.environment import load_settings
from dtrain_dagster.support.graph_names import GraphNames
from trainer.evaluation.gate import Gate
from trainer.spec import WINDOWS

REPORT = "walk_forward_report"
START = ("start_from", "start_sha256")
"""The fields of a training that name what it begins with."""
JUDGED = ("model", "loss", "training", "window", "horizon")
"""What a model has in common with the years by which it is judged."""


def refuse_without_report(folder: Path, pipeline: Pipeline, kind: str) -> None:
    """Raise `dagster.Failure` where DTRAIN_GATE=walk_forward asks for a report that is not there, or is damaged, before
    a training is planned that could not become champion. Models of other kinds than windows are not asked for one."""
    from trainer.evaluation.walk_forward import LEAST_YEARS

    if load_settings().gate != "walk_forward" or kind != WINDOWS:
        return
    names = pipeline.names.walk_forward
    if pipeline.source != "prices":
        remedy = "the data of this graph are not prices, so it has no walk forward: set DTRAIN_GATE=test"
    else:
        remedy = (
            f"run the walk forward first (dagster job backfill -j {names.pipeline}, at least {LEAST_YEARS} years of "
            "the same training), or set DTRAIN_GATE=test"
        )
    try:
        report = read_report(folder, pipeline.names)
    except ValueError as error:
        raise dg.Failure(f"DTRAIN_GATE=walk_forward: {error}", allow_retries=False) from error
    if report is None:
        where = report_path(folder, pipeline.names)
        raise dg.Failure(f"DTRAIN_GATE=walk_forward, but there is no {where}: {remedy}", allow_retries=False)


def judge_by_walk_forward(
    gate: Gate, document: Mapping[str, Any] | None, plan: TrainingPlan, manifest: Mapping[str, Any]
) -> Gate:
    """Return the verdict on a model whose own test gave ``gate``, where its kind must have stood the walk forward too:
    the same model, loss, training and sample, all years together. ``document``: the report; None where there is none.
    ``manifest``: of the model's dataset. Pure."""
    if document is None:
        reasons = [
            f"DTRAIN_GATE=walk_forward, but there is no {REPORT}: run the walk forward first, or set DTRAIN_GATE=test"
        ]
    else:
        its = flat({name: document["settings"][name] for name in JUDGED})
        mine = flat(training_settings(plan) | {name: manifest[name] for name in ("window", "horizon")})
        other = next((name for name in sorted(mine.keys() | its.keys()) if mine.get(name) != its.get(name)), None)
        reasons = [f"walk forward: {reason}" for reason in document["gate"]["reasons"]]
        if other is not None:
            reasons = [
                f"the walk forward judged {other} = {its.get(other)}, and this is {mine.get(other)}: run the walk "
                "forward with these settings, or train with the others"
            ]
    return Gate(gate.passed and not reasons, (*gate.reasons, *reasons))


def read_report(folder: Path, names: GraphNames) -> dict[str, Any] | None:
    """Return the latest report of a graph, None where there is none. Raise ValueError for a damaged one."""
    path = report_path(folder, names)
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        missing = [name for name in JUDGED if name not in found["settings"]]
        if missing or not isinstance(found["gate"]["reasons"], list):
            raise ValueError(f"its settings lack {', '.join(missing)}")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): materialize {names.key(REPORT).to_user_string()}") from error
    return found


def training_settings(plan: TrainingPlan) -> dict[str, Any]:
    """Return the model, loss and training of a plan, without what it begins with and where it must stop. Pure."""
    left_out = (*START, "max_node_seconds", "threads_per_rank")
    training = {name: value for name, value in plan.job["training"].items() if name not in left_out}
    return {"model": plan.job["model"], "loss": plan.job["loss"], "training": training}


def report_path(folder: Path, names: GraphNames) -> Path:
    """Return the file of a graph's report below the storage of this machine."""
    return folder / "walk_forward" / f"{names.pipeline or 'stock'}.json"


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return nested fields by their dotted names. Pure."""
    if isinstance(value, Mapping) and value:
        parts = [flat(each, f"{name}.{part}" if name else str(part)) for part, each in value.items()]
        return {key: each for found in parts for key, each in found.items()}
    return {name: value}
