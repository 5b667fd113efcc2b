"""The tracker is arithmetic, checked by hand-made numbers; its properties are in `test_ledger`. And when a job has no
budget left to continue with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain_dagster.costs.plan import is_spent, node_seconds_of
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.costs.tracker import CostTracker, overrun
from dtrain_dagster.costs.usage import NodeUsage


def test_cost_metrics():
    usage = [NodeUsage(node_id=n, sku="Standard_NC6s_v3", started_at=0, ended_at=3600 * (n + 1)) for n in range(2)]
    metrics = CostTracker("local", usage, "low_priority").metrics(epochs=3, estimated_usd=1.0)
    assert metrics.total_cost_usd == pytest.approx(3 * 0.3978)
    assert metrics.training_duration_hours == pytest.approx(2)
    assert metrics.cost_per_epoch == pytest.approx(0.3978)
    assert overrun(metrics.total_cost_usd, metrics.estimated_total_cost) == pytest.approx(0.1934)
    with pytest.raises(ValueError, match="must be positive"):
        overrun(1.0, 0.0)


CHEAP, DEAR = "Standard_NC6s_v3", "Standard_NC24ads_A100_v4"


@pytest.mark.parametrize(("before", "after"), [(CHEAP, DEAR), (DEAR, CHEAP), (CHEAP, CHEAP)])
def test_a_budget_in_dollars_holds_whatever_the_nodes_cost_that_a_job_goes_on_with(before: str, after: str):
    paid = [NodeUsage(node_id=n, sku=before, started_at=0, ended_at=900, tier="dedicated") for n in range(2)]
    limit = node_seconds_of(10.0, paid, after, "spot")
    assert limit > 1800, "there are dollars left"
    rest = NodeUsage(node_id=0, sku=after, started_at=1000, ended_at=1000 + limit - 1800, tier="spot")
    assert CostTracker("", [*paid, rest], "low_priority").total_usd == pytest.approx(10.0)
    spent = CostTracker("", paid, "dedicated").total_usd
    assert node_seconds_of(spent / 2, paid, after, "dedicated") == 1800, "not one second more"
    assert node_seconds_of(10.0, [], after, "dedicated") == pytest.approx(
        10 / price_of(after).usd_per_hour("dedicated") * 3600
    )


SKU = "Standard_NC6s_v3"
DOLLARS = 40 / 3600 * price_of(SKU).usd_per_hour("dedicated")
"""They buy 40 node-seconds."""


@given(paid=st.floats(30, 39), began=st.floats(1.7e9, 1.9e9))
def test_dollars_that_are_spent_buy_no_launch_however_they_are_rounded(paid: float, began: float):
    """A job keeps back what a checkpoint takes, so it is never paid all of its budget. The dollars become seconds again
    from what it was paid, with an error of about a microsecond: in every second case they are more than before."""
    stopped_at = node_seconds_of(DOLLARS, [], SKU, "dedicated")
    usage = [NodeUsage(node_id=0, sku=SKU, started_at=began, ended_at=began + paid)]
    again = node_seconds_of(DOLLARS, usage, SKU, "dedicated")
    assert abs(again - stopped_at) < 1e-4
    assert is_spent(again, paid, stopped_at)


def test_a_job_goes_on_with_what_it_may_still_be_paid():
    assert not is_spent(40.0, 38.0, None), "its last launch ended for another reason"
    assert is_spent(40.0, 40.0, None)
    assert not is_spent(60.0, 38.0, 40.0), "raised"
    assert is_spent(30.0, 38.0, 40.0), "lowered"
