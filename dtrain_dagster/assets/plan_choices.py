"""The choices in the metadata of `cost_estimate`: a table, a picture, and the source of each figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg

from dtrain_dagster.assets.common import MOST_ROWS, best_rows, charts, table_file
from dtrain_dagster.support.formatting import dollars, format_duration

if TYPE_CHECKING:
    from dtrain_dagster.planning.choices import Choices, PlanChoice


SHOWN = ("choice", "usd", "mark", "seconds")
"""The columns of the table on the page; the file has all."""


def choices_dots(table: Choices) -> str:
    """Return a small picture of time and cost of all choices."""
    from dtrain_dagster.reports.small_pictures import small_dots

    points = [(row.seconds.expected, row.usd.expected) for row in table.rows]
    mine = table.planned
    marked = None if mine is None else (mine.seconds.expected, mine.usd.expected)
    return small_dots(points, marked, f"{len(points)} choices: time →, cost ↑; orange: this plan")


def choices_metadata(table: Choices, fingerprint: str, storage_uri: str) -> dict[str, Any]:
    """Return ``choice`` (`explain_choice`), ``choices`` (the cheapest ones and the planned one), ``choices_file`` (all
    of them, as CSV), ``choices_picture``, ``choices_rest_on`` and ``choices_not_available``, each only where it is not
    empty."""
    from dtrain_dagster.reports.cost_charts import choices_chart
    from dtrain_dagster.settings.tiers import tier_in_words

    metadata: dict[str, Any] = {}
    if table.rows:
        metadata["choice"] = explain_choice(table)
        first = [choice for choice in table.rows[:MOST_ROWS] if not choice.is_planned]
        planned = [choice for choice in table.rows if choice.is_planned]
        best = sorted([*first[: MOST_ROWS - len(planned)], *planned], key=lambda choice: choice.usd.expected)
        shown = [_row(choice) | {"choice": choice.name} for choice in best]
        metadata["choices"] = best_rows(shown, SHOWN)
        rows = [_row(choice) for choice in table.rows]
        metadata["choices_file"] = table_file(f"{storage_uri}/plans/{fingerprint}", "choices.csv", rows)
        metadata["choices_picture"] = charts({"Cost against time of every choice": choices_chart(table)})
    metadata["choices_rest_on"] = dg.MarkdownMetadataValue(_rest_on(table))
    if table.not_available:
        missing = [
            {"sku": item.sku.removeprefix("Standard_"), "tier": tier_in_words(item.tier), "why": item.why}
            for item in table.not_available
        ]
        metadata["choices_not_available"] = best_rows(missing)
    return metadata


def explain_choice(table: Choices) -> str:
    """Return what runs, what fewer nodes of the same kind would save, and the cheapest of all choices, each with its
    dollars and its time. Pure."""
    from dtrain_dagster.planning.choices import misses

    planned, cheapest = table.planned, table.cheapest
    if planned is None:
        said = ["The planned nodes are not among the choices (see choices_not_available)."]
    else:
        said = [f"This plan runs on {in_words(planned, table.place)}."]
        kind = (planned.sku, planned.tier)
        fewer = [row for row in table.rows if (row.sku, row.tier) == kind and row.node_count < planned.node_count]
        fitting = [row for row in fewer if not misses(row, table.deadline_seconds, table.budget_usd)]
        least = min(fitting, key=lambda row: row.usd.expected, default=planned)
        if least.usd.expected < planned.usd.expected:
            said.append(f"{_compared(least, planned)}: `choose_nodes: true` takes it.")
    if cheapest is None:
        said.append("No choice is sure to keep the limits.")
    elif planned is None:
        said.append(f"The cheapest of all choices is {in_words(cheapest)}.")
    elif cheapest is planned:
        said.append("It is the cheapest of all choices.")
    elif (cheapest.sku, cheapest.tier) != (planned.sku, planned.tier) or cheapest.node_count > planned.node_count:
        said.append(
            f"Of all choices the cheapest is {_compared(cheapest, planned)}, {cheapest.origin} "
            "(DTRAIN_GPU_TYPE, DTRAIN_TIER, DTRAIN_NODES)."
        )
    return " ".join(said)


def _compared(other: PlanChoice, planned: PlanChoice) -> str:
    """Return ``1 × NC6s_v3 (dedicated): $0.031 instead of $0.083, 36 s instead of 32 s``."""
    return (
        f"{other.name}: {dollars(other.usd.expected)} instead of {dollars(planned.usd.expected)}, "
        f"{format_duration(other.seconds.expected)} instead of {format_duration(planned.seconds.expected)}"
    )


def in_words(choice: PlanChoice, place: str = "") -> str:
    """Return ``2 × NC6s_v3 (dedicated): 3 h 10 min (2 h 50 min to 3 h 40 min), $19.38 ($17.34 to $22.44); scaled from
    …``"""
    from dtrain_dagster.planning.choices import name_nodes

    seconds, usd = choice.seconds, choice.usd
    name = name_nodes(choice.node_count, choice.sku.removeprefix("Standard_"), choice.tier, place)
    return (
        f"{name}: {format_duration(seconds.expected)} "
        f"({format_duration(seconds.low)} to {format_duration(seconds.high)}), "
        f"{dollars(usd.expected)} ({dollars(usd.low)} to {dollars(usd.high)}); {choice.time_from}"
    )


def _row(choice: PlanChoice) -> dict[str, str | int | float]:
    from dtrain_dagster.settings.tiers import tier_in_words

    told = (("this plan", choice.is_planned), ("cheapest", choice.is_cheapest), ("Pareto", choice.is_pareto))
    marks = [word for word, holds in told if holds]
    seconds, usd = choice.seconds, choice.usd
    return {
        "mark": ("➜ " if choice.is_planned else "") + ", ".join(marks),
        "nodes": choice.node_count,
        "sku": choice.sku,
        "gpus": f"{choice.node_count * choice.gpus} × {choice.gpu}",
        "tier": tier_in_words(choice.tier),
        "usd": round(usd.expected, 6),
        "usd_range": f"{dollars(usd.low)} to {dollars(usd.high)}",
        "seconds": round(seconds.expected, 1),
        "time": format_duration(seconds.expected),
        "time_range": f"{format_duration(seconds.low)} to {format_duration(seconds.high)}",
        "usd_per_epoch": round(choice.usd_per_epoch, 5),
        "global_batch": choice.global_batch,
        "efficiency_percent": round(100 * choice.efficiency, 1),
        "why_not": choice.why_not,
        "time_from": choice.time_from,
        "price_from": choice.price_from,
    }


def _rest_on(table: Choices) -> str:
    dollars_are = f"Dollars are time × nodes × price: {table.price_words}."
    lines = [f"Times rest on {table.basis}.", dollars_are, *table.assumptions]
    return "\n".join(f"- {line}" for line in lines)
