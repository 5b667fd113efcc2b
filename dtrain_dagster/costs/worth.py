"""Whether a network has earned its dollars: what it gains over the linear model, and what that has cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrain_dagster.support.formatting import dollars
from trainer.evaluation.gate import CHANCE_T, chance_t, is_beyond_chance
from trainer.spec import REGRESSION, ROWS

NATS = "nats"


def _linear_gain(evaluation: Mapping[str, Any]) -> tuple[str, float, str, float | None] | None:
    """Return over which linear model a model gains how much on the test split, in which unit, and the paired
    t-statistic: over ridge (windows) in nats per window, or over the linear model (rows) in nats per row or as a share
    of its squared error. None where they were not compared."""
    model, baselines = evaluation["model"], evaluation["baselines"]
    if evaluation.get("kind") != ROWS:
        row = baselines.get("ridge", {})
        amount = row.get("model_gain_nll")
        return None if amount is None else ("ridge", amount, NATS, row.get("model_gain_t"))
    linear, is_number = baselines.get("linear", {}), evaluation.get("task") == REGRESSION
    name = "rmse" if is_number else "log_loss"
    own, other = model.get(name), linear.get(name)
    if own is None or other is None or (is_number and other == 0):
        return None
    amount, unit = (1 - (own / other) ** 2, "less squared error") if is_number else (other - own, NATS)
    return "the linear model", amount, unit, linear.get("model_gain_t")


def worth_line(evaluation: Mapping[str, Any], usd: float | None) -> str | None:
    """Return in one line whether the network has earned its dollars (None: not known), in dollars per nat. None where
    nothing was compared, as of a script's model without a measure."""
    price = "at a cost that is not known" if usd is None else f"for {dollars(usd)}"
    if evaluation.get("chance") is not None:
        return f"{chance_line(evaluation)} {price}"
    if not is_judged(evaluation):
        return None
    gain = _linear_gain(evaluation)
    if gain is None:
        return f"not compared with a linear model, {price}"
    over, amount, unit, t = gain
    shown = f"{_signed(amount, '.4f' if unit == NATS else '.1%')} {unit}"
    why = "not tested for chance" if t is None else f"t {_signed(t, '.1f')}"
    if t is not None and not is_beyond_chance(t):
        return f"over {over}: no gain beyond chance ({shown}, {why}) {price}"
    if amount <= 0:
        return f"over {over}: no gain ({shown}, {why}) {price}"
    if not usd or unit != NATS:
        return f"over {over}: {shown} ({why}) {price}"
    each = usd / amount
    return f"over {over}: {shown} ({why}) {price}: {f'${each:,.0f}' if each >= 10 else dollars(each)} per nat"


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
