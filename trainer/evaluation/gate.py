"""Whether a model may be promoted: pure decisions over the figures of ``evaluation.json``. Imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.spec import REGRESSION, ROWS, WINDOWS

COVERAGE_LOW, COVERAGE_HIGH = 0.87, 0.93
LEAK_RANK_IC = 0.08
LEAK_ACCURACY = 0.53
LEAK_T = 4.0
"""High, because a forecast that merely prefers some tickers has a rank IC that hardly changes from day to day: over
half a year of four tickers, t reaches 3 by luck. A planted label gives 50 and more."""
MUST_BEAT = ("ewma", "har_x")
"""The plain baselines of windows."""
PLAIN: Mapping[str, tuple[str, ...]] = {WINDOWS: MUST_BEAT, ROWS: ("constant",)}
"""The baselines that a model has to be better than, by the kind of its data."""
IN_WORDS: Mapping[str, str] = {
    WINDOWS: "the linear one is ridge, the plain ones are EWMA and HAR-X",
    ROWS: "the linear one is a linear or logistic regression, the plain one the constant",
}
"""What `RULE` calls the baselines of each kind."""
CHANCE_T = 2.0
"""The absolute t-statistic up to which a difference could be chance."""
BEYOND_CHANCE = f"beyond chance (paired t-statistic above {CHANCE_T:g}: Newey-West's over days; of a table over rows)"
"""What the words mean wherever they are used."""
RULE = (
    f"no baseline, the linear one included, is better {BEYOND_CHANCE}, the model is better than the plain ones, its "
    f"90 % interval covers {100 * COVERAGE_LOW:g} to {100 * COVERAGE_HIGH:g} % where it forecasts windows, and nothing "
    "suggests a leak"
)
"""What `gate` asks for, in words: descriptions, the card and the documentation use these."""
POINT_RULE = "its squared error is below that of forecasting zero, and nothing suggests a leak"
"""What `gate` asks of a model of windows that forecasts no distribution."""
_LABELS = {"nll": "NLL", "log_loss": "log-loss", "rmse": "RMSE"}


@dataclass(frozen=True, slots=True)
class Gate:
    """A verdict with its reasons; ``reasons`` says why not, and is empty where it passed."""

    passed: bool
    reasons: tuple[str, ...]


def suspect_leak(halves: Sequence[Mapping[str, float | None]]) -> str | None:
    """Return why the mean forecast is too good to be true, None where it is not.

    ``halves`` holds the figures of consecutive parts of the judged period: ``rank_ic``, ``balanced_accuracy`` and their
    Newey-West t-statistics ``rank_ic_t``, ``balanced_accuracy_t``. Daily prices do not give a rank IC above 0.08 or
    more than 53 % right, sustained over years; where every half shows it, and not by chance, the future has leaked into
    the features.
    """
    for name, limit in (("rank_ic", LEAK_RANK_IC), ("balanced_accuracy", LEAK_ACCURACY)):
        values = [half.get(name) or 0.0 for half in halves]
        certain = all((half.get(f"{name}_t") or 0.0) > LEAK_T for half in halves)
        if values and min(values) > limit and certain:
            shown = " and ".join(f"{value:.3f}" for value in values)
            return f"{name} is {shown} in the halves of the period, above {limit}: the features may contain the future"
    return None


def gate(report: Mapping[str, Any]) -> Gate:
    """Judge ``evaluation.json`` by `RULE`, and a point forecast of windows by `POINT_RULE`. Never by directional
    accuracy: ``always up`` has a good one."""
    kind, score = report.get("kind", WINDOWS), score_of(report)
    reasons = _suspicions(report)
    if score is None:
        return _point_gate(report, reasons) if kind == WINDOWS else Gate(False, (_NO_SCORE, *reasons))
    own, baselines, label = report["model"][score], report["baselines"], _LABELS[score]
    said = []
    for name in PLAIN[kind]:
        row = baselines.get(name, {})
        gain, _ = gain_of(row)
        if gain is None:
            said.append(f"the baseline {name} could not be judged on this dataset")
        elif not gain > 0:
            said.append(f"{label} {own:.4f} is not below {name}'s {row[score]:.4f}")
    said += [
        f"{name}'s {label} {baselines[name][score]:.4f} is better than {own:.4f} {beyond_chance(baselines[name])}"
        for name in better_baselines(report)
        if name not in PLAIN[kind]
    ]
    coverage = report["model"].get("coverage_90")
    if kind == WINDOWS and not COVERAGE_LOW <= coverage <= COVERAGE_HIGH:
        said.append(f"the 90 % interval covers {coverage:.3f}, outside [{COVERAGE_LOW}, {COVERAGE_HIGH}]")
    return Gate(not said and not reasons, (*said, *reasons))


def judge_by_measure(report: Mapping[str, Any]) -> Gate:
    """Judge the report of a model without baselines by the measure that chose its weights: on a test split, against the
    same outputs with the targets of other samples. A report without such a measure does not pass."""
    found = report.get("chance")
    if found is None:
        return Gate(False, (NO_MEASURE,))
    if report.get("split") != "test":
        return Gate(False, ("there is no test split: the weights were chosen by the samples that would judge them",))
    t = chance_t(found)
    if t > CHANCE_T:
        return Gate(True, ())
    name, value, shuffled = found["figure"], found["value"], found["shuffled"]
    return Gate(False, (f"{name} {value:.4f} is not better than with shuffled targets ({shuffled:.4f}, t {t:.1f})",))


NO_MEASURE = (
    "a script brings no baselines for the gate to compare its model with, and no measure chose its weights "
    "(training.monitor): look at its figures, and give the alias champion in MLflow yourself"
)


def chance_t(found: Mapping[str, Any]) -> float:
    """Return by how many deviations of shuffled targets a figure is better than their mean. ``found``: ``chance`` of a
    report."""
    gain = found["value"] - found["shuffled"]
    gain = gain if found["mode"] == "max" else -gain
    if found["deviation"]:
        return float(gain / found["deviation"])
    return math.copysign(math.inf, gain) if gain else 0.0


_NO_SCORE = "the loss gives neither probabilities nor a forecast: there is nothing to compare with the baselines"


def gate_document(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdict of `gate` as ``evaluation.json`` has it."""
    verdict = gate(report)
    return {"passed": verdict.passed, "reasons": list(verdict.reasons)}


def score_of(report: Mapping[str, Any]) -> str | None:
    """Return the name of the figure by which the model and its baselines are compared; None for a loss that gives no
    such figure. Lower is better."""
    kind, model = report.get("kind", WINDOWS), report["model"]
    score = "nll" if kind == WINDOWS else "rmse" if report.get("task") == REGRESSION else "log_loss"
    return score if model.get(score) is not None else None


def _point_gate(report: Mapping[str, Any], reasons: Sequence[str]) -> Gate:
    ratio = report["model"].get("mse_to_zero")
    if ratio is None:
        return Gate(False, ("the loss gives neither a distribution nor a point forecast: there is nothing to compare",))
    poor = [] if ratio < 1 else [f"its squared error is {ratio:.4f} of a zero forecast's: no better than no model"]
    return Gate(not poor and not reasons, (*poor, *reasons))


def _suspicions(report: Mapping[str, Any]) -> list[str]:
    """Return what suggests a leak: a mean forecast of windows that is too good, or a canary of other kinds."""
    leak = suspect_leak(report.get("halves", ()))
    sung = [name for name, canary in report.get("canaries", {}).items() if not canary["passed"]]
    return [*([leak] if leak else []), *(f"the canary {name} was not silent: see the notes" for name in sung)]


def gain_of(row: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return by how much the model is better than a baseline, and the paired t-statistic, from the baseline's
    figures."""
    return row.get("model_gain_nll", row.get("model_gain")), row.get("model_gain_t")


def is_beyond_chance(t: float | None) -> bool:
    """Return whether a difference with this t-statistic is more than chance gives; False where there is none, for want
    of days or rows."""
    return t is not None and abs(t) > CHANCE_T


def better_baselines(report: Mapping[str, Any]) -> list[str]:
    """Return the baselines that are better than the model beyond chance, on the same windows or rows. Where
    there are too few of them for a t-statistic, a better figure is enough: what cannot be tested is not decided for the
    model."""
    gains = {name: gain_of(row) for name, row in report["baselines"].items()}
    return [
        name
        for name, (gain, t) in gains.items()
        if gain is not None and gain < 0 and (t is None or is_beyond_chance(t))
    ]


def beyond_chance(row: Mapping[str, Any]) -> str:
    """Return the words for a baseline that `better_baselines` names, from its figures."""
    _, t = gain_of(row)
    return "on too little to test for chance" if t is None else f"beyond chance (t {-t:.1f})"
