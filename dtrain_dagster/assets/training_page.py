"""The page of `trained_checkpoint` (how good the model is, its curves, its scores among those of baselines) and its
checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from dtrain_dagster.assets.common import (
    best_rows,
    charts,
    head_of_page,
    links,
    page_of,
    round_figures,
    sentences,
    strategy_table,
)
from dtrain_dagster.assets.training_progress import COST_CHECK, communication_shares
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.prices import PriceError
from dtrain_dagster.costs.tracker import CostTracker, overrun
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.costs.worth import worth_line
from dtrain_dagster.jobs.totals import read_phase_totals, sum_launches
from dtrain_dagster.monitoring.windows import COMMUNICATION_LIMIT, settled, shares, windows, with_own_cores
from dtrain_dagster.reports.small_pictures import small_curves
from dtrain_dagster.settings.environment import load_settings
from dtrain_dagster.settings.notices import studio_url
from dtrain_dagster.settings.tiers import Tier
from dtrain_dagster.support.formatting import dollars, in_markdown
from trainer.data.manifest import load_manifest
from trainer.elastic.generation_record import generations
from trainer.evaluation.gate import BEYOND_CHANCE, better_baselines, gain_of, score_of
from trainer.rundir import LAUNCH, RunDir
from trainer.storage.open import open_storage

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
    from dtrain_dagster.reports.charts import calibration_chart, skill_chart, training_curves
    from dtrain_dagster.reports.kind_scores import figures_table, has_kind_scores

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
        metadata["scores"] = dg.MarkdownMetadataValue(figures_table(evaluation))
    metadata |= links(dashboard=job_url, studio=studio_url((rundir.read_json(LAUNCH) or {}).get("studio_url")))
    metadata["curves"] = charts({"Training curves": training_curves(steps, evaluations)})
    if model.get("nll") is not None:
        metadata["skill"] = charts({"Skill against the baselines": skill_chart(model, evaluation["baselines"])})
        metadata["calibration"] = charts({"Calibration": calibration_chart(evaluation["calibration"])})
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
    """Return metadata: what a job took over all launches, and what of it the last one took if there were several."""
    took = sum_launches(usage, tier)
    metadata: dict[str, Any] = {
        "launches": took.launches,
        "wall_seconds": round(took.seconds, 1),
        "node_hours": round(took.node_hours, 5),
    }
    if took.usd is not None:
        metadata["cost_usd"] = round(took.usd, 5)
    return metadata | took.last_metadata()


def training_checks(key: dg.AssetKey) -> list[dg.AssetCheckSpec]:
    """Return the checks of a trained checkpoint with this key."""
    return [
        dg.AssetCheckSpec(
            "weights_equal_on_all_ranks",
            asset=key,
            blocking=True,
            description="The final weights of all ranks have one sha256.",
        ),
        dg.AssetCheckSpec(
            "every_sample_used_once",
            asset=key,
            blocking=True,
            description="Each sample of the training split was used exactly once per epoch, no matter which nodes "
            "were lost: the trainer's records of what it consumed match the dataset's own count. Where samples are "
            "drawn by weights, each draw was made once; of a stream, whose length nobody knows, each sample that was "
            "drawn from its sub-streams was used once.",
        ),
        dg.AssetCheckSpec(
            "communication_within_limits",
            asset=key,
            description=f"Communication takes at most {COMMUNICATION_LIMIT:.0%} of the time: network time that "
            "nothing hides, and waiting at collectives. More than that is reported while the job runs; the whole "
            "job is judged at its end.",
        ),
        dg.AssetCheckSpec(
            COST_CHECK,
            asset=key,
            description="The training exceeds its estimate by no more than DTRAIN_OVERRUN_FRACTION. The sensor "
            "cost_overrun reports it while the training runs, from the cost so far and the projected cost.",
        ),
        dg.AssetCheckSpec(
            "no_baseline_is_better",
            asset=key,
            description=f"No baseline is better on the same test windows or rows {BEYOND_CHANCE}.",
        ),
    ]


def check_training(
    events: Sequence[dict[str, Any]],
    result: dict[str, Any],
    evaluation: dict[str, Any],
    plan: TrainingPlan,
    usage: Sequence[NodeUsage],
) -> list[dg.AssetCheckResult]:
    """Return the results of `training_checks` for a finished training. ``usage``: of its own nodes."""
    return [
        _weights_check(result),
        _samples_check(result, plan),
        communication_check(events, plan.job["training"]),
        _cost_check(usage, plan),
        _baselines_check(evaluation),
    ]


def _cost_check(usage: Sequence[NodeUsage], plan: TrainingPlan) -> dg.AssetCheckResult:
    """Return the check of the whole job's cost against its estimate."""
    limit, estimated = load_settings().overrun_fraction, plan.estimate.usd.expected
    try:
        usd = CostTracker("", usage, plan.tier).total_usd
    except PriceError as error:  # the training is done, whatever it has cost; nobody can say that it was within limits
        metadata = {"cost": f"not known: {error}", "estimated_usd": round_figures(estimated)}
        return dg.AssetCheckResult(
            check_name=COST_CHECK, passed=False, severity=dg.AssetCheckSeverity.WARN, metadata=metadata
        )
    over = overrun(usd, estimated)
    return dg.AssetCheckResult(
        check_name=COST_CHECK,
        passed=over <= limit,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={
            "cost": f"{dollars(usd)} ({plan.price_words})",
            "cost_usd": round_figures(usd),
            "estimated_usd": round_figures(estimated),
            "over_estimate_percent": round(100 * over, 1),
        },
    )


def communication_check(events: Sequence[dict[str, Any]], training: Mapping[str, Any]) -> dg.AssetCheckResult:
    """Return the check of the whole job's communication against its limit, with the changes that would help."""
    from dtrain_dagster.monitoring.alerts import communication_alert

    found = settled(windows(events))
    alert = communication_alert(found, training)
    unjudged = "ranks share cores: their collectives wait for a core, which says nothing about the network"
    metadata: dict[str, Any] = {"limit_percent": 100 * COMMUNICATION_LIMIT}
    metadata |= (
        communication_shares(shares(found)) if found else {"communication_percent": "not known: no timing was recorded"}
    )
    if alert:
        metadata["strategies"] = dg.MarkdownMetadataValue(strategy_table(alert.strategies))
    return dg.AssetCheckResult(
        check_name="communication_within_limits",
        passed=alert is None,
        severity=dg.AssetCheckSeverity.WARN,
        description=alert.sentence if alert else unjudged if found and not with_own_cores(found) else None,
        metadata=metadata,
    )


def _weights_check(result: dict[str, Any]) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        check_name="weights_equal_on_all_ranks",
        passed=bool(result["weights_equal_on_ranks"]),
        metadata={"sha256": result["weights_sha256"], "ranks": result["world_size"]},
    )


def _samples_check(result: dict[str, Any], plan: TrainingPlan) -> dg.AssetCheckResult:
    """Return the check that the trainer's records add up to the number of samples in the dataset's manifest, or to
    that which the script had before the training."""
    # numpy, which the code location does not need to load
    from trainer.data.coverage import STREAM, find_coverage_errors, kind_of_data

    own = plan.job.get("script") or load_manifest(open_storage(plan.job["dataset"]["uri"]))
    count, epochs = own["samples"]["train"], result["consumed"]
    kind = kind_of_data(plan.job["dataset"].get("dataset_id") or "")
    wrong = find_coverage_errors(epochs, count, int(result["epochs"]), kind)
    return dg.AssetCheckResult(
        check_name="every_sample_used_once",
        passed=not wrong,
        metadata={
            "samples": sum(item["samples"] for item in epochs) if kind == STREAM else count,
            "epochs": len(epochs),
            "counted": kind,
            "wrong": sentences(wrong),
        },
    )


def _baselines_check(evaluation: dict[str, Any]) -> dg.AssetCheckResult:
    score, better = score_of(evaluation), better_baselines(evaluation)
    gains = {name: gain_of(row) for name, row in evaluation["baselines"].items()}
    untested = [name for name, (gain, t) in gains.items() if gain is not None and t is None]
    figure = {score: evaluation["model"][score]} if score else {"nll": "not judged: this loss predicts no distribution"}
    return dg.AssetCheckResult(
        check_name="no_baseline_is_better",
        passed=not better,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={**figure, "better": sentences(better)}
        | ({"not_tested_for_chance": sentences(untested)} if untested else {}),
    )
