"""Every estimate is scored: how far off it was, and whether its interval can be believed (R5.1, R5.2)."""

from collections.abc import Sequence
from typing import Any

import dagster as dg

from dtrain_dagster.assets.costs import cost_breakdown
from dtrain_dagster.costs.history import past_scores
from dtrain_dagster.costs.scoring import Score, learn, summarise
from dtrain_dagster.monitoring.charts import markdown_image
from dtrain_dagster.monitoring.charts_scores import history_chart
from dtrain_dagster.wording import dollars, duration


@dg.asset_check(
    asset=cost_breakdown,
    name="estimate_scored",
    description="Time and cost of the finished run lay within the 90 % interval that was given before it started. "
    "Shows how good this instance's estimates were so far; the next ones learn from it.",
)
def estimate_scored(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
    scores = [past.score for past in past_scores(context.instance)]
    return judged(scores)


def judged(scores: Sequence[Score]) -> dg.AssetCheckResult:
    """The latest of these against its estimate, and all of them together; the oldest first."""
    if not scores:
        return dg.AssetCheckResult(
            passed=True, metadata={"why": "not scored: no finished run of this instance says what was estimated"}
        )
    last, together = scores[-1], summarise(scores)
    next_one = learn(scores, last.basis, last.sku)
    metadata: dict[str, Any] = {
        "usd_error_percent": _percent(last.usd_error),
        "seconds_error_percent": _percent(last.seconds_error),
        "within_interval": last.is_within,
        "cost": f"{dollars(last.actual_usd)}; estimated {_told(last.usd, dollars)}",
        "time": f"{duration(last.actual_seconds)}; estimated {_told(last.seconds, duration)}",
        "basis": last.basis,
        "runs": together.runs,
        "median_error_percent": _percent(together.median_error or 0.0),
        "coverage_90_percent": _percent(together.coverage or 0.0),
        "learned": f"the next estimate on {last.sku} from a {last.basis} is multiplied by {next_one.factor:.3f}",
        "history": dg.MarkdownMetadataValue(markdown_image(history_chart(scores), "Estimates so far")),
    }
    return dg.AssetCheckResult(passed=last.is_within, severity=dg.AssetCheckSeverity.WARN, metadata=metadata)


def _told(interval: Any, write: Any) -> str:
    return f"{write(interval.expected)} ({write(interval.low)} to {write(interval.high)})"


def _percent(share: float) -> float:
    return round(100 * share, 1)
