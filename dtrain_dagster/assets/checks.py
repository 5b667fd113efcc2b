"""The checks of a trained checkpoint, and those that run beside the assets: a dataset for leakage, and each estimate by
what its run took.

Checks that an asset makes as it is made are with it: of prices in `dataset`, of the bill in `costs`, of a version in
`registry`.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import dagster as dg

from dtrain_dagster.assets.common import round_figures, sentences
from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.assets.training_progress import communication_shares
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.prices import PriceError
from dtrain_dagster.costs.tracker import CostTracker, overrun
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.data.build_once import BuiltDataset
from dtrain_dagster.jobs.start import code_version
from dtrain_dagster.monitoring.windows import COMMUNICATION_LIMIT, settled, shares, windows, with_own_cores
from dtrain_dagster.planning.evidence import latest_score, past_scores
from dtrain_dagster.planning.projection import THRESHOLDS
from dtrain_dagster.planning.scoring import Score, learn
from dtrain_dagster.resources import ProjectResource, project_resource
from dtrain_dagster.support.formatting import dollars, format_duration
from dtrain_dagster.support.graph_names import GraphNames
from trainer.data.manifest import load_manifest
from trainer.evaluation.gate import BEYOND_CHANCE, better_baselines, gain_of, score_of
from trainer.storage.open import open_storage

LEAKAGE_CHECK_SECONDS = 300
COST_CHECK = "cost_within_estimate"


def build_leakage_checks(pipeline: Pipeline) -> dg.AssetChecksDefinition:
    """Return the leakage checks of a graph's `sharded_dataset`."""
    names, key = pipeline.names, pipeline.names.key("sharded_dataset")

    @dg.multi_asset_check(
        name=names.unique("leakage_checks"),
        required_resource_keys={names.project},
        ins={"sharded_dataset": dg.AssetIn(key=key)},
        specs=[
            dg.AssetCheckSpec(
                "shuffled_labels_teach_nothing",
                asset=key,
                blocking=True,
                description="A model trained on labels of other windows is no better than the unconditional "
                "distribution.",
            ),
            dg.AssetCheckSpec(
                "planted_leak_is_caught",
                asset=key,
                blocking=True,
                description="With the label among the features the leak alarm goes off (a warning where it does not, "
                "which blocks nothing: there are few days); without it, it stays silent.",
            ),
        ],
    )
    def leakage_checks(
        context: dg.AssetCheckExecutionContext, sharded_dataset: BuiltDataset
    ) -> Iterable[dg.AssetCheckResult]:
        """Run the leakage checks: three regressions (some seconds), once per dataset and version of the trainer."""
        project = project_resource(context, names)
        kind = sharded_dataset.manifest().get("kind", "windows")
        if kind != "windows":
            why = f"not judged: these checks are for windows of prices, and this is a dataset of {kind}"
            for name in ("shuffled_labels_teach_nothing", "planted_leak_is_caught"):
                yield dg.AssetCheckResult(check_name=name, asset_key=key, passed=True, metadata={"why": why})
            return
        # Not in its folder, which may be read-only, or another project's.
        kept_at = f"{project.storage_uri}/leakage_checks/{sharded_dataset.dataset_id}"
        yield from check_leakage(project, sharded_dataset.uri, kept_at, key)

    return leakage_checks


def check_leakage(project: ProjectResource, uri: str, kept_at: str, key: dg.AssetKey) -> Iterator[dg.AssetCheckResult]:
    """Yield the results of a dataset's leakage checks, whose report is in the folder ``kept_at``."""
    storage = open_storage(kept_at)
    name = f"{code_version()}.json"
    if not storage.exists(name):
        storage.write(name, _run_leakage_checks(project, uri))
    report = json.loads(storage.read(name))
    figures = {f"{trial}_nll": result["nll"] for trial, result in report["trials"].items()}
    for check, reasons in report["checks"].items():
        metadata: dict[str, Any] = {"reasons": sentences(reasons), "constant_nll": report["constant_nll"], **figures}
        metadata["seconds"] = report["seconds"]
        is_warning = check in report.get("warnings", ())
        severity = dg.AssetCheckSeverity.WARN if is_warning else dg.AssetCheckSeverity.ERROR
        yield dg.AssetCheckResult(
            check_name=check, asset_key=key, passed=not reasons, severity=severity, metadata=metadata
        )


def _run_leakage_checks(project: ProjectResource, uri: str) -> bytes:
    """Return the JSON report of the leakage checks, which run in a process of their own: torch stays out of this
    one."""
    command = [sys.executable, "-m", "dtrain_dagster.data.leakage_check", "--dataset", uri]
    environment = os.environ | project.trainer_env()
    done = subprocess.run(command, capture_output=True, timeout=LEAKAGE_CHECK_SECONDS, env=environment, check=False)
    if done.returncode != 0:
        raise dg.Failure(f"the leakage checks could not be run: {done.stderr.decode(errors='replace')[-2000:]}")
    return done.stdout.splitlines()[-1]


def build_estimate_scored(names: GraphNames) -> dg.AssetChecksDefinition:
    """Return the check `estimate_scored` of a graph's `cost_breakdown`."""

    @dg.asset_check(
        asset=names.key("cost_breakdown"),
        name="estimate_scored",
        description="Time and cost of the finished run lay within the 90 % interval that was estimated before it "
        "started. Shows how accurate this instance's estimates have been; later estimates learn from it. A run "
        "on a different SKU or tier than planned is not scored.",
    )
    def estimate_scored(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """Judge this run's estimate against what the run took, and all past estimates together."""
        latest = latest_score(context.instance, context.run.run_id, names)
        return judged(latest, past_scores(context.instance, names))

    return estimate_scored


def judged(latest: tuple[str, Score | str] | None, scores: Sequence[Score]) -> dg.AssetCheckResult:
    """Return the check's result: a job's own score, or why it has none; and all scores together, the oldest first."""
    if latest is None:
        return dg.AssetCheckResult(passed=True, metadata={"why": "not scored: cost_breakdown has reported no run yet"})
    job_id, last = latest
    if isinstance(last, str):
        return dg.AssetCheckResult(passed=True, metadata={"job_id": job_id, "why": f"not scored: {last}"})
    next_one = learn(scores, last.basis, last.sku)
    errors = [abs(score.usd_error) for score in scores] or [0.0]
    held = [score.is_within for score in scores] or [False]
    metadata: dict[str, Any] = {
        "job_id": job_id,
        "usd_error_percent": _percent(last.usd_error),
        "seconds_error_percent": _percent(last.seconds_error),
        "within_interval": last.is_within,
        "cost": f"{dollars(last.actual_usd)}; estimated {_told(last.usd, dollars)}",
        "time": f"{format_duration(last.actual_seconds)}; estimated {_told(last.seconds, format_duration)}",
        "basis": last.basis,
        "runs": len(scores),
        "median_error_percent": _percent(statistics.median(errors)),
        "coverage_90_percent": _percent(statistics.fmean(held)),
        "learned": f"the next estimate on {last.sku} from a {last.basis} is multiplied by {next_one.factor:.3f}",
    }
    if last.disturbed:
        metadata["not_learned"] = f"{last.disturbed}: nothing is learned from it"
    return dg.AssetCheckResult(passed=last.is_within, severity=dg.AssetCheckSeverity.WARN, metadata=metadata)


def _told(interval: Any, write: Any) -> str:
    return f"{write(interval.expected)} ({write(interval.low)} to {write(interval.high)})"


def _percent(share: float) -> float:
    return round(100 * share, 1)


@dataclass(frozen=True, slots=True)
class FinishedTraining:
    """What the checks of a trained checkpoint judge."""

    events: Sequence[dict[str, Any]]
    result: dict[str, Any]
    evaluation: dict[str, Any]
    plan: TrainingPlan
    usage: Sequence[NodeUsage]
    """Of its own nodes."""


class TrainingCheck(NamedTuple):
    """A check of a trained checkpoint: what Dagster shows of it, and how it is judged."""

    name: str
    description: str
    judge: Callable[[FinishedTraining], dg.AssetCheckResult]
    """Its result has the name of the check."""
    blocking: bool = False


def _cost_check(usage: Sequence[NodeUsage], plan: TrainingPlan) -> dg.AssetCheckResult:
    """Return the check of the whole job's cost against its estimate."""
    estimated = plan.estimate.usd.expected
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
        passed=over <= THRESHOLDS[0],
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
    from dtrain_dagster.monitoring.strategies import change_table

    found = settled(windows(events))
    alert = communication_alert(found, training)
    unjudged = "ranks share cores: their collectives wait for a core, which says nothing about the network"
    metadata: dict[str, Any] = {"limit_percent": 100 * COMMUNICATION_LIMIT}
    metadata |= (
        communication_shares(shares(found)) if found else {"communication_percent": "not known: no timing was recorded"}
    )
    if alert:
        metadata["strategies"] = dg.MarkdownMetadataValue(change_table(alert.changes))
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


TRAINING_CHECKS = (
    TrainingCheck(
        "weights_equal_on_all_ranks",
        "The final weights of all ranks have one sha256.",
        lambda training: _weights_check(training.result),
        blocking=True,
    ),
    TrainingCheck(
        "every_sample_used_once",
        "Each sample of the training split was used exactly once per epoch, no matter which nodes were lost: the "
        "trainer's records of what it consumed match the dataset's own count. Where samples are drawn by weights, each "
        "draw was made once; of a stream, whose length nobody knows, each sample that was drawn from its sub-streams "
        "was used once.",
        lambda training: _samples_check(training.result, training.plan),
        blocking=True,
    ),
    TrainingCheck(
        "communication_within_limits",
        f"Communication takes at most {COMMUNICATION_LIMIT:.0%} of the time: network time that nothing hides, and "
        "waiting at collectives. More than that is reported while the job runs; the whole job is judged at its end.",
        lambda training: communication_check(training.events, training.plan.job["training"]),
    ),
    TrainingCheck(
        COST_CHECK,
        "The training exceeds its estimate by no more than 25 %. The sensor cost_overrun reports it while the training "
        "runs, from the cost so far and the projected cost.",
        lambda training: _cost_check(training.usage, training.plan),
    ),
    TrainingCheck(
        "no_baseline_is_better",
        f"No baseline is better on the same test windows or rows {BEYOND_CHANCE}.",
        lambda training: _baselines_check(training.evaluation),
    ),
)
"""The checks of a trained checkpoint. A further one is a line here and its function above."""


def training_check_specs(key: dg.AssetKey) -> list[dg.AssetCheckSpec]:
    """Return the specs of `TRAINING_CHECKS` for the trained checkpoint with this key."""
    return [
        dg.AssetCheckSpec(check.name, asset=key, description=check.description, blocking=check.blocking)
        for check in TRAINING_CHECKS
    ]
