"""Whether a model may be promoted: pure decisions over the figures of ``evaluation.json``. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COVERAGE_LOW, COVERAGE_HIGH = 0.87, 0.93
LEAK_RANK_IC = 0.08
LEAK_ACCURACY = 0.53
LEAK_T = 4.0
"""High, because a forecast that merely prefers some tickers has a rank IC that hardly changes from day to day: over
half a year of four tickers, t reaches 3 by luck. A planted label gives 50 and more."""
MUST_BEAT = ("ewma", "har_x")
CHANCE_T = 2.0
"""The absolute t-statistic up to which a difference could be chance."""
BEYOND_CHANCE = f"beyond chance (paired t-statistic above {CHANCE_T:g}: Newey-West's over days)"
"""What the words mean wherever they are used of models of windows."""
RULE = (
    f"no baseline, ridge included, has a likelihood that is better {BEYOND_CHANCE}, the model's own is better than "
    f"EWMA's and HAR-X's, its 90 % interval covers {100 * COVERAGE_LOW:g} to {100 * COVERAGE_HIGH:g} %, and nothing "
    "suggests a leak"
)
"""What `gate` asks for, in words: descriptions, the card and the documentation use these."""
POINT_RULE = "its squared error is below that of forecasting zero, and nothing suggests a leak"
"""What is asked of a model that forecasts no distribution."""


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
            return (
                f"{name} is {shown} in the halves of the period, above {limit}: suspect that features hold the future"
            )
    return None


def gate(report: Mapping[str, Any]) -> Gate:
    """Judge ``evaluation.json`` by `RULE`. Never by directional accuracy: «always up» has a good one."""
    model, baselines = report["model"], report["baselines"]
    nll = model.get("nll")
    if nll is None:
        return Gate(
            False, ("the loss predicts no distribution, so its likelihood cannot be compared with the baselines",)
        )
    reasons = []
    for name in MUST_BEAT:
        other = baselines.get(name, {}).get("nll")
        if other is None:
            reasons.append(f"the baseline {name} could not be judged on this dataset")
        elif not nll < other:
            reasons.append(f"NLL {nll:.4f} is not below {name}'s {other:.4f}")
    reasons += [
        f"{name}'s NLL {baselines[name]['nll']:.4f} is better than {nll:.4f} {beyond_chance(baselines[name])}"
        for name in better_baselines(report)
        if name not in MUST_BEAT
    ]
    coverage = model["coverage_90"]
    if not COVERAGE_LOW <= coverage <= COVERAGE_HIGH:
        reasons.append(f"the 90 % interval covers {coverage:.3f}, outside [{COVERAGE_LOW}, {COVERAGE_HIGH}]")
    leak = suspect_leak(report["halves"])
    if leak:
        reasons.append(leak)
    return Gate(not reasons, tuple(reasons))


def is_beyond_chance(t: float | None) -> bool:
    """Return whether a difference with this t-statistic is more than chance gives; False where there is none, for want
    of days."""
    return t is not None and abs(t) > CHANCE_T


def better_baselines(report: Mapping[str, Any]) -> list[str]:
    """Return the baselines that are better than the model beyond chance, on the same windows or rows. Where there are
    too few days for a t-statistic, a better likelihood is enough: what cannot be tested is not decided for the
    model."""
    gains = {
        name: (row.get("model_gain_nll", row.get("model_gain")), row.get("model_gain_t"))
        for name, row in report["baselines"].items()
    }
    return [
        name
        for name, (gain, t) in gains.items()
        if gain is not None and gain < 0 and (t is None or is_beyond_chance(t))
    ]


def beyond_chance(row: Mapping[str, Any]) -> str:
    """Return the words for a baseline that `better_baselines` names, from its figures."""
    t = row["model_gain_t"]
    return "on too few days to test for chance" if t is None else f"beyond chance (t {-t:.1f})"
