"""Prices and tracker are arithmetic, checked by hand-made numbers and by properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain_dagster.clusters.base import NodeUsage
from dtrain_dagster.costs.tracker import CostTracker, overrun

stretches = st.lists(
    st.builds(
        lambda node, start, length: NodeUsage(
            node_id=node, sku="Standard_NC6s_v3", started_at=start, ended_at=start + length
        ),
        st.integers(0, 7),
        st.floats(0, 1e5),
        st.floats(0, 1e5),
    ),
    min_size=1,
    max_size=12,
)


@given(stretches, st.integers(1, 40))
def test_the_parts_add_up_to_the_whole(usage, periods):
    tracker = CostTracker("local", usage, "dedicated")
    assert sum(node.usd for node in tracker.nodes) == pytest.approx(tracker.total_usd)
    assert sum(period.usd for period in tracker.by_period(periods)) == pytest.approx(tracker.total_usd, abs=1e-9)
    assert tracker.total_usd == pytest.approx(tracker.node_hours * 3.06)


def test_cost_metrics():
    usage = [NodeUsage(node_id=n, sku="Standard_NC6s_v3", started_at=0, ended_at=3600 * (n + 1)) for n in range(2)]
    metrics = CostTracker("local", usage, "low_priority").metrics(epochs=3, estimated_usd=1.0)
    assert metrics.total_cost_usd == pytest.approx(3 * 0.61)
    assert metrics.training_duration_hours == pytest.approx(2)
    assert metrics.cost_per_epoch == pytest.approx(0.61)
    assert overrun(metrics.total_cost_usd, metrics.estimated_total_cost) == pytest.approx(0.83)
    with pytest.raises(ValueError, match="must be positive"):
        overrun(1.0, 0.0)
