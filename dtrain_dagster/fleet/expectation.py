"""What a job of a fleet is expected to take, where its file does not say: from past runs, or a first guess. Pure.

Neither decides what may be spent: that is bounded by promises (`grants`), and as soon as a job tells its speed, that
counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dtrain_dagster.costs.estimate import Forecast
from dtrain_dagster.fleet.grants import LEAST_WORK_SECONDS
from dtrain_dagster.fleet.jobs import FleetLimits

GIVEN_SPREAD, GUESSED_SPREAD = 0.3, 1.0
"""Standard deviation of what somebody has given, and of what nobody knows, as a fraction of it."""
STARTUP_SECONDS = 20.0
GIVEN = "given"


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What a job is expected to take."""

    node_seconds: float
    """As on one node, from its first step to its end."""
    spread: float
    """Standard deviation of that as a fraction of it."""
    startup_seconds: float
    """From the start of a launch to its first step."""
    words: str
    """Where the figures come from."""


def expect_given(node_seconds: float) -> Expectation:
    """Return the expectation of somebody who has given it."""
    return Expectation(
        node_seconds=node_seconds, spread=GIVEN_SPREAD, startup_seconds=STARTUP_SECONDS, words=GIVEN
    )  # fmt: skip


def expect_like_past_runs(forecast: Forecast, serial_share: float) -> Expectation:
    """Return what past runs tell, of a job with this serial share (`FleetJob.serial_share`)."""
    nodes = forecast.measured[0].node_count
    parts, seconds = forecast.parts(nodes), forecast.seconds_at(nodes)
    return Expectation(
        node_seconds=(parts.total - parts.startup) / (serial_share + (1 - serial_share) / nodes),
        spread=math.log(seconds.high / seconds.expected),
        startup_seconds=parts.startup,
        words=forecast.basis_words,
    )


def guess(limits: FleetLimits, jobs: int, least_nodes: int) -> Expectation:
    """Return a first guess of a job of which nothing is known, one of so many in its fleet: a slice, or less where the
    budget has less for each job. So it begins, and tells its speed."""
    share = limits.seconds_of(limits.budget_units) / jobs / least_nodes - STARTUP_SECONDS - limits.margin_seconds
    work = min(limits.slice_seconds, max(LEAST_WORK_SECONDS, share / (1 + GUESSED_SPREAD)))
    return Expectation(
        node_seconds=work, spread=GUESSED_SPREAD, startup_seconds=STARTUP_SECONDS,
        words="a first guess: no past run of the same model, data and batch is known here",
    )  # fmt: skip
