"""What a job took is the sum over its launches, without the time between them."""

from __future__ import annotations

import pytest

from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.jobs.totals import sum_launches, sum_phases
from trainer.rundir import event

SKU = "Standard_NC6s_v3"
HOURLY = price_of(SKU).usd_per_hour("dedicated")


def stay(launch: int, node: int, began: float, ended: float) -> NodeUsage:
    return NodeUsage(node_id=node, sku=SKU, started_at=began, ended_at=ended, launch=launch)


FIRST = [stay(1, node, 0.0, 470.0) for node in range(2)]
SECOND = [stay(2, 0, 36_000.0, 36_132.0), stay(2, 1, 36_000.0, 36_100.0)]


def test_a_job_with_one_launch_says_nothing_of_launches():
    took = sum_launches(FIRST, "dedicated")
    assert (took.launches, took.seconds, took.last) == (1, 470.0, None)
    assert (took.words, took.of_which) == ("7 min 50 s", "")
    assert took.node_hours_words == "0.2611 node-hours"
    nothing = sum_launches([])
    assert (nothing.launches, nothing.seconds, nothing.node_hours, nothing.last) == (0, 0.0, 0.0, None)


def test_totals_are_of_all_launches_and_say_what_the_last_one_took():
    took = sum_launches([*FIRST, *SECOND], "dedicated")
    assert took.words == "10 min 02 s over 2 launches, of which the last took 2 min 12 s"
    assert took.node_hours == pytest.approx((940 + 232) / 3600)
    assert took.usd == pytest.approx(HOURLY * (940 + 232) / 3600)
    assert took.last is not None
    assert (took.last.seconds, took.last.usd) == (132.0, pytest.approx(HOURLY * 232 / 3600))
    tracker = CostTracker("", [*FIRST, *SECOND], "dedicated")
    assert tracker.wall_seconds == took.seconds, "ten hours in which nothing was paid for are no time of the job"
    assert took.usd == tracker.total_usd
    assert sum_launches([*FIRST, *SECOND]).usd is None


def test_phases_are_summed_over_launches_and_not_over_the_ranks_0_of_one():
    told = [
        event("phase", 0, 1, name="training", seconds=100.0),
        event("phase", 0, 1, name="training", seconds=200.0),
        event("phase", 1, 1, name="training", seconds=999.0),
        event("phase", 0, 2, name="training", seconds=190.0),  # another is rank 0, who was there from the start
        event("phase", 0, 2, name="training", seconds=250.0),
        event("phase", 0, 3, name="startup", seconds=9.0),
        event("phase", 0, 3, name="training", seconds=40.0),
    ]
    assert sum_phases(told, {1: 1, 2: 1, 3: 2}) == {"training": 290.0, "startup": 9.0}
    assert sum_phases(told, {}) == {"training": 490.0, "startup": 9.0}, "of fixed ranks each start has its own number"
