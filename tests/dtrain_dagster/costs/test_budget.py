"""When a job has no budget left to continue with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dtrain_dagster.costs.budget import is_spent, node_seconds_of
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.costs.usage import NodeUsage

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
