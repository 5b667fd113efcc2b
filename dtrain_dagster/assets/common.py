"""What all assets share: owners, code version, and how figures are written for people.

Assets that pass a value on have no return annotation: Dagster takes a bare ``MaterializeResult`` for one without a
value, and a parametrised one does not go together with check specs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import dagster as dg

from dtrain_dagster.monitoring.strategies import Strategy
from trainer.rundir import RunDir

OWNERS = ["team:ml-platform"]
CODE_VERSION = "1"
"""Raise it when an asset's meaning changes: Dagster then marks what was made before as out of date."""


def dollars(usd: float) -> str:
    """``$0.0042``, ``$1.23``, ``$1,234``: enough digits to be a figure, not more."""
    if abs(usd) >= 1000:
        return f"${usd:,.0f}"
    return f"${usd:.2f}" if abs(usd) >= 1 else f"${usd:.4f}"


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def rounded(value: Any) -> Any:
    """A figure as metadata shows it; anything else as it is."""
    return round(value, 6) if isinstance(value, float) else value


def read_finished(rundir: RunDir, name: str) -> dict[str, Any]:
    """A document of a job that has succeeded. `dagster.Failure` where it is missing: the folder was changed since."""
    document = rundir.read_json(name)
    if document is None:
        raise dg.Failure(f"{rundir.uri} has no {name}: its job did not finish; materialize trained_checkpoint again")
    return document


def strategy_table(strategies: Iterable[Strategy]) -> str:
    """What to change as a Markdown table, in the order given, with what it is expected to gain."""
    rows = [
        "| what | change | samples/s | per dollar | step | wire then | mind |",
        "|---|---|---|---|---|---|---|",
    ]
    for item in strategies:
        speed = f"{item.gain:+.0%} ({item.samples_per_second:,.0f})"
        step = f"{1000 * item.step_seconds:.3g} ms | {item.communication_share:.0%}"
        rows.append(f"| **{item.name}** | {item.change} | {speed} | {item.cost_gain:+.0%} | {step} | {item.note} |")
    return "\n".join(rows) if len(rows) > 2 else "Nothing that these figures speak for."
