"""The check that scores every estimate: how far off it was, and whether its interval can be believed."""

from collections.abc import Sequence
from typing import Any

import dagster as dg

from dtrain_dagster.planning.history import latest_score, past_scores
from dtrain_dagster.planning.scoring import Score, learn, summarise_scores
from dtrain_dagster.support.formatting import dollars, format_duration
from dtrain_dagster.support.graph_names import GraphNames


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
