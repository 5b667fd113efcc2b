"""What a search costs at most, what it is expected to cost, and what it is expected to find; said beforehand. Pure, but
for `past_searches`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrain_dagster.search import FOLDER
from dtrain_dagster.search.kept import RESULT
from dtrain_dagster.search.settings import SearchSettings
from dtrain_dagster.search.trials import REDUCTION, Pruner, TrialSeconds
from dtrain_dagster.support.formatting import dollars, format_duration

LEAST_SCORES = 5
"""Trials of earlier searches from which something is said of what this one finds."""
SURE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class PastSearch:
    """A search that is over, of the same data and metric."""

    name: str
    pruner: str
    share: float
    """What it cost, as a share of what it would have cost with every trial trained to its end."""
    scores: tuple[float, ...]
    """The best score of each trial that was trained to its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchPlan:
    """The plan of a search."""

    trial_usd: float
    """A trial that is trained to its end."""
    at_most_usd: float
    expected_usd: float
    seconds: float
    """Expected seconds to the last trial."""
    lines: tuple[str, ...]
    """The same in sentences."""


def plan_search(
    settings: SearchSettings, usual: TrialSeconds, usd_per_node_hour: float, at_once: int, budget_usd: float | None,
    past: Sequence[PastSearch] = (),
) -> SearchPlan:  # fmt: skip
    """Return the plan. ``usual``: what a trial takes; ``at_once``: nodes that work at the same time; ``past``: earlier
    searches of the same data and metric."""
    whole = usual.total * usd_per_node_hour / 3600
    most = settings.trials * whole
    alike = [item.share for item in past if item.pruner == settings.pruner]
    fixed = (usual.startup + usual.finish) / usual.total
    if settings.pruner is Pruner.NONE:
        share, basis = 1.0, "no trial is ended early"
    elif alike:
        share, basis = statistics.fmean(alike), f"as in {len(alike)} earlier search(es) of this data"
    else:
        share = fixed + (1 - fixed) * halving_share(usual.of)
        basis = "as successive halving ends trials"
    limit = math.inf if budget_usd is None else budget_usd
    expected = min(limit, share * most)
    seconds = share * settings.trials * usual.total / max(1, at_once)
    capped = f", and never above the budget of {dollars(limit)}" if limit < most else ""
    lines = [
        f"{settings.trials} trials of {usual.of} evaluation(s); one that goes to its end takes "
        f"{format_duration(usual.total)} of node time, {dollars(whole)}",
        f"at most {dollars(min(limit, most))}{capped}; expected {dollars(expected)} ({basis}), in about "
        f"{format_duration(seconds)}",
        expected_find(settings, past),
    ]
    return SearchPlan(
        trial_usd=whole, at_most_usd=min(limit, most), expected_usd=expected, seconds=seconds, lines=tuple(lines)
    )


def halving_share(of: int) -> float:
    """Return the share of all evaluations that successive halving does, where scores say nothing of each other."""
    alive, done, rung = 1.0, 0.0, 1
    for number in range(1, of + 1):
        done += alive
        if number == rung and number < of:
            alive, rung = alive / REDUCTION, rung * REDUCTION
    return done / of


def expected_find(settings: SearchSettings, past: Sequence[PastSearch]) -> str:
    """Return what the best trial is expected to be, in a sentence: by the scores of earlier searches, or else by its
    rank in the space alone, which holds for any metric where trials are drawn at random."""
    scores = sorted((score for item in past for score in item.scores), reverse=settings.maximise)
    count = settings.trials
    if len(scores) >= LEAST_SCORES:
        middle, worst = (
            scores[min(len(scores) - 1, int(len(scores) * rank))] for rank in (_rank(count, 0.5), _rank(count, SURE))
        )
        return (
            f"expected to find {settings.metric} {middle:.6g} or better, and with {SURE:.0%} {worst:.6g}, by "
            f"{len(scores)} trials of earlier searches of this data"
        )
    return (
        "no score can be predicted until this data has been searched once; with "
        f"{SURE:.0%} confidence, the best of {count} random trials is among the best "
        f"{100 * _rank(count, SURE):.2g} % of the space"
    )


def _rank(count: int, sure: float) -> float:
    """Return the share of the best of a space in which the best of ``count`` random draws is, with this probability."""
    return 1 - (1 - sure) ** (1 / count)


def past_searches(home: Path, name: str, dataset_id: str | None, metric: str) -> list[PastSearch]:
    """Return the searches of this home that are over, of this data and metric, but the one of this ``name``. One that
    cannot be read is left out."""
    found: list[PastSearch] = []
    for path in sorted((home / FOLDER).glob(f"*/{RESULT}")):
        if path.parent.name == name:
            continue
        try:
            kept = json.loads(path.read_text())
            if kept["metric"] != metric or kept["dataset_id"] != dataset_id or not kept["usd"] > 0:
                continue
            whole = [row for row in kept["trials"] if row["state"] == "complete" and row["score"] is not None]
            costs = [row["usd"] for row in whole if row["usd"] > 0]
            if not costs:
                continue
            full = statistics.fmean(costs) * sum(row["usd"] > 0 for row in kept["trials"])
            share = min(1.0, sum(row["usd"] for row in kept["trials"]) / full)
            scores = tuple(float(row["score"]) for row in whole)
            found.append(PastSearch(name=path.parent.name, pruner=kept["pruner"], share=share, scores=scores))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found
