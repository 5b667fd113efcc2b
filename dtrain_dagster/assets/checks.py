"""The checks that judge what came later: each estimate by what its run took, and the champion by the days after its own
data."""

from collections.abc import Sequence
from typing import Any

import dagster as dg

from dtrain_dagster.assets.common import sentences
from dtrain_dagster.automation.retraining import CHAMPION_CHECK, prices_of, registrations
from dtrain_dagster.data.sharding import BuiltDataset
from dtrain_dagster.jobs.orders import order_of
from dtrain_dagster.planning.history import latest_score, past_scores
from dtrain_dagster.planning.scoring import Score, learn, summarise_scores
from dtrain_dagster.resources import project_resource
from dtrain_dagster.support.formatting import dollars, format_duration
from dtrain_dagster.support.graph_names import GraphNames
from dtrain_dagster.support.secrets import redact
from trainer.evaluation.gate import BEYOND_CHANCE, better_baselines
from trainer.rundir import RunDir


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
        scores = [past.score for past in past_scores(context.instance, names)]
        return judged(latest_score(context.instance, context.run.run_id, names), scores)

    return estimate_scored


def judged(latest: tuple[str, Score | str] | None, scores: Sequence[Score]) -> dg.AssetCheckResult:
    """Return the check's result: a job's own score, or why it has none; and all scores together, the oldest first."""
    if latest is None:
        return dg.AssetCheckResult(passed=True, metadata={"why": "not scored: cost_breakdown has reported no run yet"})
    job_id, last = latest
    if isinstance(last, str):
        return dg.AssetCheckResult(passed=True, metadata={"job_id": job_id, "why": f"not scored: {last}"})
    together, next_one = summarise_scores(scores), learn(scores, last.basis, last.sku)
    metadata: dict[str, Any] = {
        "job_id": job_id,
        "usd_error_percent": _percent(last.usd_error),
        "seconds_error_percent": _percent(last.seconds_error),
        "within_interval": last.is_within,
        "cost": f"{dollars(last.actual_usd)}; estimated {_told(last.usd, dollars)}",
        "time": f"{format_duration(last.actual_seconds)}; estimated {_told(last.seconds, format_duration)}",
        "basis": last.basis,
        "runs": together.runs,
        "median_error_percent": _percent(together.median_error or 0.0),
        "coverage_90_percent": _percent(together.coverage or 0.0),
        "learned": f"the next estimate on {last.sku} from a {last.basis} is multiplied by {next_one.factor:.3f}",
    }
    if last.disturbed:
        metadata["not_learned"] = f"{last.disturbed}: nothing is learned from it"
    return dg.AssetCheckResult(passed=last.is_within, severity=dg.AssetCheckSeverity.WARN, metadata=metadata)


def _told(interval: Any, write: Any) -> str:
    return f"{write(interval.expected)} ({write(interval.low)} to {write(interval.high)})"


def _percent(share: float) -> float:
    return round(100 * share, 1)


REASSESS_SECONDS = 300
"""The seconds that the champion has for its forecasts of the new days."""
DAYS_ENOUGH = 20
"""The number of new days below which chance decides."""


def build_champion_holds(names: GraphNames) -> dg.AssetChecksDefinition:
    """Return the check `champion_holds` of a graph's `sharded_dataset`."""

    @dg.asset_check(
        asset=names.key("sharded_dataset"),
        name=CHAMPION_CHECK,
        required_resource_keys={names.project},
        description=(
            f"On the days since the champion's own data, {DAYS_ENOUGH} at least, no baseline's likelihood is better "
            f"than the champion's {BEYOND_CHANCE}. The sensor `staleness` retrains where one is."
        ),
    )
    def champion_holds(context: dg.AssetCheckExecutionContext, sharded_dataset: BuiltDataset) -> dg.AssetCheckResult:
        """Compare the champion with the baselines on the days since its own data; pass where there is nothing to judge
        by."""
        champion, _ = registrations(context.instance, names)
        project = project_resource(context, names)
        # Here, not above: the registry's package loads what the code location does not need.
        import numpy as np

        from dtrain_dagster.registry.promotion import judge_later_days
        from dtrain_dagster.registry.run_model import load_run_model, refuse_change
        from trainer.data.shards import DataShardManager

        if champion is None or not champion.run_dir:
            return _not_judged("no champion was registered yet")
        known = prices_of(project.shared_uri, champion.dataset_id)
        if known is None:
            return _not_judged(f"dataset {champion.dataset_id} of the champion no longer exists")
        facts: dict[str, Any] = {
            "champion": champion.version,
            "dataset_id": sharded_dataset.dataset_id,
            "after": known.last_date,
        }
        if sharded_dataset.manifest()["source"]["last_date"] <= known.last_date:
            return _not_judged("there are no new days since", **facts)
        rundir = RunDir(champion.run_dir)
        try:
            model = load_run_model(rundir, order_of(project.home, rundir))
            refuse_change(rundir.uri, model.digests, champion.digests)
            shards = DataShardManager(sharded_dataset.uri, project.cache_dir)
            report = judge_later_days(model, shards, np.datetime64(known.last_date), REASSESS_SECONDS)
        except (ValueError, OSError) as error:  # its files are gone, or are not what was ordered and registered
            return _not_judged(redact(str(error))[-1000:], **facts)
        if report["days"] < DAYS_ENOUGH:
            return _not_judged(f"{report['days']} of its days came since, {DAYS_ENOUGH} are enough", **facts)
        if report["nll"] is None:
            return _not_judged("the champion does not forecast a distribution", **facts)
        better = better_baselines(report)
        return dg.AssetCheckResult(
            passed=not better,
            severity=dg.AssetCheckSeverity.WARN,
            metadata={
                **facts,
                "better": sentences(better),
                "nll": report["nll"],
                "days": report["days"],
                "windows": report["windows"],
                "baselines": dg.JsonMetadataValue(report["baselines"]),
            },
        )

    return champion_holds


def _not_judged(why: str, **facts: Any) -> dg.AssetCheckResult:
    """Return a passed check with the reason why the champion was not judged."""
    return dg.AssetCheckResult(passed=True, metadata={**facts, "not_judged": why})
