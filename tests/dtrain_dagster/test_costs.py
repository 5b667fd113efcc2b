"""The tracker is arithmetic, checked by hand-made numbers; its properties are in `test_ledger`."""

import pytest

from dtrain_dagster.clusters.base import NodeUsage
from dtrain_dagster.costs.tracker import CostTracker, overrun


def test_cost_metrics():
    usage = [NodeUsage(node_id=n, sku="Standard_NC6s_v3", started_at=0, ended_at=3600 * (n + 1)) for n in range(2)]
    metrics = CostTracker("local", usage, "low_priority").metrics(epochs=3, estimated_usd=1.0)
    assert metrics.total_cost_usd == pytest.approx(3 * 0.61)
    assert metrics.training_duration_hours == pytest.approx(2)
    assert metrics.cost_per_epoch == pytest.approx(0.61)
    assert overrun(metrics.total_cost_usd, metrics.estimated_total_cost) == pytest.approx(0.83)
    with pytest.raises(ValueError, match="must be positive"):
        overrun(1.0, 0.0)
