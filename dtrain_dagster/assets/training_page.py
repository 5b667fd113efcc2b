"""The page of `trained_checkpoint` (how good the model is, its curves, its scores among those of baselines)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from dtrain_dagster.assets.common import (
    best_rows,
    head_of_page,
    links,
    page_of,
    round_figures,
)
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.costs.worth import worth_line
from dtrain_dagster.jobs.totals import read_phase_totals, sum_launches
from dtrain_dagster.reports.small_pictures import small_curves
from dtrain_dagster.settings.notices import studio_url
from dtrain_dagster.settings.tiers import Tier
from dtrain_dagster.support.formatting import in_markdown
from trainer.elastic.generation_record import generations
from trainer.evaluation.gate import score_of
from trainer.rundir import LAUNCH, RunDir

if TYPE_CHECKING:
    from trainer.elastic.generation import Generation


def training_page(
    rundir: RunDir,
    events: Sequence[dict[str, Any]],
    result: dict[str, Any],
    evaluation: dict[str, Any],
    plan: TrainingPlan,
    usage: Sequence[NodeUsage],
    job_url: str,
) -> dict[str, Any]:
    """Return the page of a finished training. ``usage``: of its own nodes."""
    from dtrain_dagster.registry.versions import scores_table
    from dtrain_dagster.reports.kind_scores import has_kind_scores

    steps, evaluations = ([item for item in events if item["kind"] == kind] for kind in ("step", "evaluation"))
    totals = totals_metadata(usage, plan.tier)
    worth = worth_line(evaluation, sum_launches([*usage, *plan.probe_usage], plan.tier).usd)
    model, history, score = evaluation["model"], generations(rundir.storage), score_of(evaluation)
    curves = {
        "training": [(row["step"], row["loss"]) for row in steps],
        "validation": [(row["step"], row["loss"]) for row in evaluations if row.get("split") == "valid"],
    }
    metadata = head_of_page(
        next(iter(evaluation["notes"]), "The training has finished."),
        small_curves(curves),
        {
            f"test_{score or 'loss'}": round_figures(model.get(score or "loss")),
            "train_seconds": round_figures(read_phase_totals(rundir, events).get("training", result["train_seconds"])),
            "cost_usd": totals.get("cost_usd"),
        },
    )
    if model.get("nll") is not None:
        metadata["scores"] = best_rows(_score_rows(evaluation), ("name", "nll", "t"))
    elif has_kind_scores(evaluation):
        metadata["scores"] = dg.MarkdownMetadataValue(scores_table(evaluation, is_table=True))
    metadata |= links(dashboard=job_url, studio=studio_url((rundir.read_json(LAUNCH) or {}).get("studio_url")))
    metadata["notes"] = dg.MarkdownMetadataValue("\n".join(f"- {in_markdown(note)}" for note in evaluation["notes"]))
    metadata["membership"] = dg.MarkdownMetadataValue(membership_table(history))
    rest: dict[str, Any] = {
        "job_id": rundir.uri.rsplit("/", 1)[-1],
        "run_dir": dg.MetadataValue.path(rundir.uri),
        "steps": result["steps"],
        "world_size": result["world_size"],
        "generations": len(history),
        "dataset_id": plan.job["dataset"]["dataset_id"],
        "weights_sha256": f"{result['weights_sha256'][:16]}…, the full hash is in the data version",
        **totals,
        **{f"test_{name}": round_figures(value) for name, value in model.items() if isinstance(value, float)},
    }
    return page_of(metadata, rest) | ({"earned": worth} if worth else {})


def _score_rows(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for the model and each baseline that forecasts a distribution, the best first."""
    scored = [("this model", evaluation["model"]), *evaluation["baselines"].items()]
    rows = sorted((item for item in scored if item[1].get("nll") is not None), key=lambda item: item[1]["nll"])
    return [
        {
            "name": name,
            "nll": round(row["nll"], 4),
            "coverage_90": round(row["coverage_90"], 3),
            "model_gain": round(row.get("model_gain_nll") or 0.0, 4),
            "t": round(row.get("model_gain_t") or 0.0, 1),
        }
        for name, row in rows
    ]


def membership_table(history: Sequence[Generation]) -> str:
    """Return the members of each generation as a Markdown table, one row per generation."""
    rows = ["| generation | at | from step | nodes | mode | why |", "|---|---|---|---|---|---|"]
    for item in history:
        at = datetime.fromtimestamp(item.formed_at, UTC).strftime("%H:%M:%S")
        nodes = ", ".join(str(seat.node) for seat in item.members)
        mode = "parameter server" if item.topology == "star" else "all-reduce"
        rows.append(f"| {item.number} | {at} UTC | {item.step} | {nodes} | {mode} | {in_markdown(item.reason)} |")
    return "\n".join(rows)


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
