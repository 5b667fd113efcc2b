"""Whether a network has earned its dollars: what it gains over the linear model, and what that has cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtrain_dagster.support.formatting import dollars
from trainer.evaluation.gate import CHANCE_T, chance_t, is_beyond_chance
from trainer.spec import REGRESSION, ROWS

NATS = "nats"
_SQUARED = "less squared error"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearGain:
    """What a model gains over a linear model, or the nearest thing to one, on the test split."""

    over: str
    amount: float
    """Above zero where the model is better."""
    unit: str
    """`NATS` per window or row; or of the linear model's squared error, a share."""
    t: float | None = None
    """The paired t-statistic; None where there is none."""


def linear_gain(evaluation: Mapping[str, Any]) -> LinearGain | None:
    """Return the gain over ridge (windows) or over the linear model (rows); None where they were not compared."""
    model, baselines, kind = evaluation["model"], evaluation["baselines"], evaluation.get("kind")
    if kind == ROWS:
        return _gain_of_rows(model, baselines.get("linear", {}), evaluation.get("task") == REGRESSION)
    row = baselines.get("ridge", {})
    if row.get("model_gain_nll") is None:
        return None
    return LinearGain(over="ridge", amount=row["model_gain_nll"], unit=NATS, t=row.get("model_gain_t"))


def _gain_of_rows(model: Mapping[str, Any], linear: Mapping[str, Any], is_number: bool) -> LinearGain | None:
    name = "rmse" if is_number else "log_loss"
    own, other = model.get(name), linear.get(name)
    if own is None or other is None or (is_number and other == 0):
        return None
    amount = 1 - (own / other) ** 2 if is_number else other - own
    unit = _SQUARED if is_number else NATS
    return LinearGain(over="the linear model", amount=amount, unit=unit, t=linear.get("model_gain_t"))


def worth_line(evaluation: Mapping[str, Any], usd: float | None) -> str | None:
    """Return in one line whether the network has earned its dollars (None: not known), in dollars per nat. None where
    nothing was compared, as of a script's model without a measure."""
    price = "at a cost that is not known" if usd is None else f"for {dollars(usd)}"
    if evaluation.get("chance") is not None:
        return f"{chance_line(evaluation)} {price}"
    if not is_judged(evaluation):
        return None
    gain = linear_gain(evaluation)
    if gain is None:
        return f"not compared with a linear model, {price}"
    shown, over = f"{_signed(gain.amount, '.4f' if gain.unit == NATS else '.1%')} {gain.unit}", f"over {gain.over}"
    if gain.t is None:
        why = "not tested for chance"
    else:
        why = f"t {_signed(gain.t, '.1f')}"
        if not is_beyond_chance(gain.t):
            return f"{over}: no gain beyond chance ({shown}, {why}) {price}"
    if gain.amount <= 0:
        return f"{over}: no gain ({shown}, {why}) {price}"
    if not usd or gain.unit != NATS:
        return f"{over}: {shown} ({why}) {price}"
    each = usd / gain.amount
    return f"{over}: {shown} ({why}) {price}: {f'${each:,.0f}' if each >= 10 else dollars(each)} per nat"


def is_judged(evaluation: Mapping[str, Any]) -> bool:
    """Return whether a report compares its model with anything: baselines, or a measure with shuffled targets. Pure."""
    return bool(evaluation.get("baselines")) or evaluation.get("chance") is not None


def chance_line(evaluation: Mapping[str, Any]) -> str:
    """Return what the measure that chose the weights says of a model, against shuffled targets. Pure."""
    found = evaluation["chance"]
    t = chance_t(found)
    shown = f"{found['figure']} {found['value']:.4f}, with shuffled targets {found['shuffled']:.4f}"
    return f"{shown} (t {_signed(t, '.1f')})" if t > CHANCE_T else f"no gain beyond chance ({shown})"


def _signed(value: float, form: str) -> str:
    return format(value, form).replace("-", "−").replace("%", " %")
