"""The page of `hyperparameter_search`: the best trial and what all have cost, the best score against dollars, and the
trials that came closest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from dtrain_dagster.assets.common import MOST_ROWS, best_rows, head_of_page, links, round_figures
from dtrain_dagster.reports.small_pictures import small_curves
from dtrain_dagster.support.formatting import dollars

if TYPE_CHECKING:
    from dtrain_dagster.search.results import Improvement
    from dtrain_dagster.search.run import Search
    from dtrain_dagster.search.source import TrialSource
    from dtrain_dagster.search.space import Space
    from dtrain_dagster.search.trials import Trial

MOST_PARAMETERS = 2
"""The columns of values on the page; the file has all."""


def search_page(
    search: Search, source: TrialSource, price_words: str, seconds: float, addresses: Mapping[str, str]
) -> dict[str, Any]:
    """Return the page of a search that is over. ``seconds``: of this process with it; ``addresses``: the pages of the
    web about it, by their names."""
    from dtrain_dagster.search.results import improvements

    settings, trials, result = search.request.settings, source.trials, search.result(source)
    metric, sign, best = settings.metric, settings.sign, result["best"]
    found = improvements(trials, sign)
    return {
        **head_of_page(
            verdict_of(result, price_words),
            small_curves({f"best {metric} over dollars": steps_of(found, result["usd"])}),
            {
                f"best_{metric}": round_figures(best["score"]) if best else None,
                "cost_usd": round_figures(result["usd"]),
                "trials": len(trials),
            },
        ),
        **(
            {"best_trials": best_rows(trial_rows(source.space, trials, sign, metric, result["importance"]))}
            if trials
            else {}
        ),
        **links(**addresses),
        **({"settings_file": dg.MetadataValue.path(search.best_file)} if best else {}),
        "all_trials": dg.MetadataValue.path(search.result_file),
        "search": search.request.name,
        **({"best_trial": best["trial"], "best_values": dg.JsonMetadataValue(best["values"])} if best else {}),
        "improvements": dg.MarkdownMetadataValue(improvements_list(found, metric)),
        **({"importance": dg.JsonMetadataValue(result["importance"])} if result["importance"] else {}),
        "planned": dg.MarkdownMetadataValue("\n".join(f"- {line}" for line in search.plan.lines)),
        "price": price_words,
        "seconds": round(seconds, 1),
    }


def verdict_of(result: Mapping[str, Any], price_words: str) -> str:
    """Return in a sentence which trial was best, how the others ended, and what all have cost. ``result``:
    `dtrain_dagster.search.results.result_document`. Pure."""
    best, counts, count = result["best"], result["counts"], len(result["trials"])
    paid = (
        f"all {count} trials cost {dollars(result['usd'])} ({price_words})"
        if count > 1
        else (f"it cost {dollars(result['usd'])} ({price_words})")
    )
    if best is None:
        reason = next((row["reason"] for row in result["trials"] if row["reason"]), "")
        return f"No trial was evaluated{f' ({reason})' if reason else ''}; {paid}."
    ended = [
        f"{counts[state]} {words}"
        for state, words in (("pruned", "ended early"), ("failed", "failed"))
        if counts.get(state)
    ]
    others = f"; {' and '.join(ended)}" if ended else ""
    return (
        f"Trial {best['trial']} of {count} is the best: {result['metric']} {best['score']:.6g} after "
        f"{best['evaluations']} evaluations{others}; {paid}."
    )


def steps_of(found: Sequence[Improvement], usd: float) -> list[tuple[float, float]]:
    """Return the best score so far over the dollars of all trials, as the corners of a line of steps. Pure."""
    corners: list[tuple[float, float]] = []
    for item in found:
        corners += [(item.usd, corners[-1][1]), (item.usd, item.score)] if corners else [(item.usd, item.score)]
    return [*corners, (usd, corners[-1][1])] if corners else []


def improvements_list(found: Sequence[Improvement], metric: str) -> str:
    """Return each improvement with its price, as a Markdown list. Pure."""
    lines = [
        f"- trial {item.trial}: {metric} {item.score:.6g}"
        + ("" if item.gained is None else f", better by {item.gained:.3g}")
        + f" for {dollars(item.usd_since)}"
        for item in found
    ]
    return "\n".join(lines) or "none"


def trial_rows(
    space: Space, trials: Sequence[Trial], sign: float, metric: str, importance: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return a row for each of the best trials, the best first, with the values that mattered most. Pure."""
    from dtrain_dagster.search.results import best_first

    order = sorted(space.parameters, key=lambda item: -importance.get(item.name, 0.0))
    rows = []
    for trial in best_first(trials, sign)[:MOST_ROWS]:
        score = trial.best(sign)
        row: dict[str, Any] = {
            "trial": trial.number,
            metric: "–" if score is None else f"{score:.6g}",
            "usd": round(trial.usd, 4),
            "evaluations": f"{len(trial.scores)}/{trial.of}",
        }
        values = {item.short_name: _in_short(trial.values.get(item.name, "–")) for item in order[:MOST_PARAMETERS]}
        rows.append(row | {name: value for name, value in values.items() if name not in row})
    return rows


def _in_short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
