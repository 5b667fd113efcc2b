"""Whether a network has earned its dollars, in one line."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain_dagster.costs.worth import worth_line

SURE = {"model_gain_t": 9.0}


def windows(gain: float | None, t: float | None) -> dict[str, Any]:
    return {"model": {"nll": -2.0}, "baselines": {"ridge": {"model_gain_nll": gain, "model_gain_t": t}}}


@pytest.mark.parametrize(
    ("gain", "t", "usd", "line"),
    [
        (0.006, 3.1, 2.1, "over ridge: 0.0060 nats (t 3.1) for $2.10: $350 per nat"),
        (0.006, 3.1, None, "over ridge: 0.0060 nats (t 3.1) at a cost that is not known"),
        (0.006, 3.1, 0.0, "over ridge: 0.0060 nats (t 3.1) for $0.00"),
        (-0.0004, -0.1, 0.21, "over ridge: no gain beyond chance (−0.0004 nats, t −0.1) for $0.2100"),
        (0.004, 2.0, 0.21, "over ridge: no gain beyond chance (0.0040 nats, t 2.0) for $0.2100"),
        (-0.006, -3.1, 0.21, "over ridge: no gain (−0.0060 nats, t −3.1) for $0.2100"),
        (0.006, None, 0.21, "over ridge: 0.0060 nats (not tested for chance) for $0.2100: $35 per nat"),
        (None, None, 0.21, "not compared with a linear model, for $0.2100"),
    ],
)
def test_windows(gain: float | None, t: float | None, usd: float | None, line: str) -> None:
    assert worth_line(windows(gain, t), usd) == line


def test_without_ridge_and_without_any_baseline() -> None:
    others: dict[str, Any] = {"model": {"loss": 1.0}, "baselines": {"ewma": {"nll": -1.9}}}
    assert worth_line(others, 1.0) == "not compared with a linear model, for $1.00"
    assert worth_line({"model": {"loss": 1.0}, "baselines": {}}, 1.0) is None, "as of a script"


@pytest.mark.parametrize(
    ("task", "own", "other", "line"),
    [
        (
            "binary",
            {"log_loss": 0.5},
            {"log_loss": 0.6},
            "0.1000 nats (not tested for chance) for $1.00: $10 per nat",
        ),
        ("binary", {"log_loss": 0.6}, {"log_loss": 0.5}, "no gain (−0.1000 nats, not tested for chance) for $1.00"),
        ("regression", {"rmse": 1.0}, {"rmse": 2.0}, "75.0 % less squared error (not tested for chance) for $1.00"),
        ("regression", {"rmse": 2.0}, {"rmse": 0.0}, None),
        ("binary", {"loss": 1.0}, {"log_loss": 0.5}, None),
    ],
)
def test_rows(task: str, own: dict[str, float], other: dict[str, float], line: str | None) -> None:
    evaluation = {"kind": "rows", "task": task, "model": own, "baselines": {"constant": {}, "linear": other}}
    expected = "not compared with a linear model, for $1.00" if line is None else f"over the linear model: {line}"
    assert worth_line(evaluation, 1.0) == expected
