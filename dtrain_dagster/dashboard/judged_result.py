"""The result of a job on the test split as its page shows it: the model beside its baselines, one row each. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtrain_dagster.costs.worth import is_judged, worth_line
from dtrain_dagster.dashboard.tracks import is_number
from trainer.printable import visible

FIGURES = {
    "nll": ("NLL", "nats per window, lower is better", -1),
    "log_loss": ("log loss", "nats per row, lower is better", -1),
    "rmse": ("RMSE", "lower is better", -1),
    "perplexity": ("perplexity", "lower is better", -1),
    "bits_per_byte": ("bits per byte", "lower is better", -1),
    "loss": ("loss", "lower is better", -1),
    "accuracy": ("accuracy", "higher is better", 1),
    "r2": ("R²", "higher is better", 1),
    "ece": ("calibration error", "lower is better", -1),
    "pinball": ("pinball loss", "lower is better", -1),
    "coverage_90": ("90 % coverage", "share inside the interval, 0.90 is right", 0),
    "mse_to_zero": ("squared error to zero", "below 1: better than no forecast", -1),
}
"""The figures that are shown, in order: words, meaning, and whether more is better (1), less (-1) or neither (0)."""
MOST_BASELINES, MOST_NOTES = 40, 20
MODEL = "this model"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultRow:
    """The model or a baseline, with its figures in the order of the columns; "–" where it has none."""

    name: str
    is_model: bool
    values: tuple[str, ...]
    is_best: tuple[bool, ...]
    gain: str = ""
    """By how much the model is better than this baseline, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedResult:
    """The result as a table, and what it means in words."""

    verdict: str
    """A sentence: whether the gate was passed, and why not."""
    is_passed: bool | None
    """None where no gate was asked."""
    columns: tuple[tuple[str, str], ...]
    """Words and meaning of each figure."""
    rows: tuple[ResultRow, ...]
    """The model and the baselines, the best first."""
    notes: tuple[str, ...]


def result_of(evaluation: Mapping[str, Any], usd: float | None) -> JudgedResult | None:
    """Return the result of an ``evaluation.json``; None where it has no figure. ``usd``: what the job has cost."""
    model, baselines = evaluation.get("model") or {}, evaluation.get("baselines") or {}
    names = [name for name in FIGURES if is_number(model.get(name))]
    if "loss" in names and len(names) > 1 and names[0] != "loss" and not _has(baselines, "loss"):
        names.remove("loss")  # the first figure is the same one, by its name
    if not names:
        return None
    entries = [(MODEL, model), *list(baselines.items())[:MOST_BASELINES]]
    entries = [(name, figures) for name, figures in entries if any(is_number(figures.get(each)) for each in names)]
    sign = FIGURES[names[0]][2] or 1
    entries.sort(key=lambda entry: sign * float(entry[1][names[0]]) if is_number(entry[1].get(names[0])) else -1e300)
    entries.reverse()
    best = [_best(name, entries) for name in names]
    rows = tuple(
        ResultRow(
            name=visible(str(name)),
            is_model=figures is model,
            values=tuple(_shown(figures.get(each)) for each in names),
            is_best=tuple(
                is_number(figures.get(each)) and figures[each] == top for each, top in zip(names, best, strict=True)
            ),
            gain=_gain(figures),
        )
        for name, figures in entries
    )
    gate = evaluation.get("gate") or {}
    is_passed = bool(gate.get("passed")) if gate and is_judged(evaluation) else None
    worth = worth_line(evaluation, usd) if is_judged(evaluation) else None
    notes = [*([f"Worth its cost? {worth[0].upper()}{worth[1:]}."] if worth else []), *evaluation.get("notes", ())]
    return JudgedResult(
        verdict=_verdict(is_passed, gate, evaluation),
        is_passed=is_passed,
        columns=tuple(FIGURES[name][:2] for name in names),
        rows=rows,
        notes=tuple(visible(str(note)) for note in notes[:MOST_NOTES]),
    )


def score_in_row(evaluation: Mapping[str, Any]) -> tuple[str, float | None, bool | None]:
    """Return what the list of jobs shows of a result: the words of its first figure, the model's value, and whether
    the gate was passed (None where none was asked)."""
    model, gate = evaluation.get("model") or {}, evaluation.get("gate") or {}
    name = next((name for name in FIGURES if is_number(model.get(name))), None)
    is_passed = bool(gate.get("passed")) if gate and is_judged(evaluation) else None
    return (FIGURES[name][0], float(model[name]), is_passed) if name else ("", None, is_passed)


def _verdict(is_passed: bool | None, gate: Mapping[str, Any], evaluation: Mapping[str, Any]) -> str:
    dates = [str(evaluation[name]) for name in ("first_date", "last_date") if evaluation.get(name)]
    on = f"the test split{f', {dates[0]} to {dates[-1]}' if dates else ''}"
    windows = evaluation.get("windows")
    on += f", {windows:,} windows" if isinstance(windows, int) else ""
    if is_passed is None:
        return visible(f"On {on}. No gate was asked.")
    if is_passed:
        return visible(f"The gate was passed on {on}: the model may be promoted.")
    return visible(
        f"The gate was not passed on {on}: {'; '.join(map(str, gate.get('reasons') or ('no reason given',)))}."
    )


def _gain(figures: Mapping[str, Any]) -> str:
    gain, t = figures.get("model_gain_nll"), figures.get("model_gain_t")
    if not is_number(t):
        return ""
    words = (f"{gain:+.4f} nats, " if is_number(gain) else "") + f"t = {t:+.1f}"
    return words.replace("-", "−")


def _best(name: str, entries: list[tuple[str, Mapping[str, Any]]]) -> float | None:
    values = [figures[name] for _, figures in entries if is_number(figures.get(name))]
    sign = FIGURES[name][2]
    return (max(values) if sign > 0 else min(values)) if sign and len(values) > 1 else None


def _has(baselines: Mapping[str, Mapping[str, Any]], name: str) -> bool:
    return any(is_number(figures.get(name)) for figures in baselines.values())


def _shown(value: Any) -> str:
    return f"{value:.4f}".replace("-", "−") if is_number(value) else "–"
