"""Conclusions of `benchmarks.scaling` from the rows of its trainings: pure functions, which train nothing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

LATEST = 5
"""Number of reports over which the training loss is averaged."""


def against_plain(rows: Sequence[Mapping[str, Any]], rate: str, model: str, key: str) -> dict[str, Any]:
    """Return by how much top-k is faster than allreduce, in a typical step and over the whole run. ``key`` is the
    template of the figures' names."""
    found: dict[str, Any] = {}
    for name, field in (("", "step_seconds"), ("_whole_run", "whole_run_step_seconds")):
        plain, compressed = (
            {row["round"]: row[field] for row in rows
             if (row["rate"], row["model"], row["communication"], row["hosts"]) == (rate, model, mode, 3)}
            for mode in ("allreduce", "topk")
        )  # fmt: skip
        ratios = [plain[turn] / compressed[turn] for turn in sorted(plain)]
        found |= {key.format(name): statistics.geometric_mean(ratios)}
        found |= {key.format(name) + "_rounds": [round_figure(ratio) for ratio in ratios]}
    return found


def after_a_fixed_time(rows: list[dict[str, Any]]) -> None:
    """Add to each row the training loss at the time at which the fastest comparable training has ended."""
    for row in rows:
        same = [other for other in rows if all(other[key] == row[key] for key in ("rate", "model", "ranks"))]
        row["fixed_seconds"] = min(other["curve"][-1][0] for other in same)
    for row in rows:
        losses = [loss for seconds, loss in row.pop("curve") if seconds <= row["fixed_seconds"]]
        row["train_loss_after_fixed_seconds"] = statistics.fmean(losses[-LATEST:]) if losses else None


def round_figure(value: Any) -> Any:
    """Return a float rounded to five digits, and anything else unchanged."""
    return round(value, 5) if isinstance(value, float) else value
