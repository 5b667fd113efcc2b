"""Prices, estimate and tracker are arithmetic, checked by hand-made numbers; their properties are in `test_ledger`."""

import pytest

from dtrain_dagster.clusters.base import NodeUsage
from dtrain_dagster.costs.estimate import Probe, Work, estimate_cost, estimate_seconds, work_of
from dtrain_dagster.costs.prices import PriceError, price_of, price_table
from dtrain_dagster.costs.tracker import CostTracker, overrun

PROBE = Probe(
    startup_seconds=10.0,
    step_seconds=(0.1, 0.1, 0.1, 0.2),
    evaluation_seconds=2.0,
    checkpoint_seconds=0.5,
    finish_seconds=8.0,
)


def test_every_price_has_a_date_and_a_source():
    for row in price_table().values():
        assert row.recorded_on
        assert row.source
        assert 0 < row.low_priority_usd_per_hour < row.dedicated_usd_per_hour


def test_what_cannot_be_priced_is_refused_by_name():
    with pytest.raises(PriceError, match=r"Standard_X1.*eastus.*DTRAIN_GPU_TYPE.*Standard_NC6s_v3"):
        price_of("Standard_X1")
    with pytest.raises(PriceError, match=r"Standard_ND96asr_v4.*not offered.*dedicated"):
        price_of("Standard_ND96asr_v4").usd_per_hour("low_priority")


def test_work_counts_steps_evaluations_and_checkpoints():
    work = work_of(steps_per_epoch=128, epochs=4, max_steps=None, eval_frequency=None, checkpoint_frequency=100)
    assert work == Work(steps=512, evaluations=4, checkpoints=6)
    short = work_of(steps_per_epoch=128, epochs=4, max_steps=130, eval_frequency=50, checkpoint_frequency=100)
    assert short == Work(steps=130, evaluations=3, checkpoints=2)


def test_the_estimate_adds_up():
    seconds = estimate_seconds(PROBE, Work(steps=1000, evaluations=5, checkpoints=10))
    assert seconds.expected == pytest.approx(10 + 1000 * 0.1 + 5 * 2 + 10 * 0.5 + 8)
    assert seconds.low == pytest.approx(seconds.expected * 0.85)  # the margin, wider than the probe's own spread
    assert seconds.high > seconds.expected * 1.15  # the probe's slow step counts
    estimate = estimate_cost(seconds, price_of("Standard_NC6s_v3"), "dedicated", node_count=3)
    assert estimate.usd.expected == pytest.approx(3 * 133 / 3600 * 3.06)


def test_cost_metrics():
    usage = [NodeUsage(node_id=n, sku="Standard_NC6s_v3", started_at=0, ended_at=3600 * (n + 1)) for n in range(2)]
    metrics = CostTracker("local", usage, "low_priority").metrics(epochs=3, estimated_usd=1.0)
    assert metrics.total_cost_usd == pytest.approx(3 * 0.61)
    assert metrics.training_duration_hours == pytest.approx(2)
    assert metrics.cost_per_epoch == pytest.approx(0.61)
    assert overrun(metrics.total_cost_usd, metrics.estimated_total_cost) == pytest.approx(0.83)
    with pytest.raises(ValueError, match="must be positive"):
        overrun(1.0, 0.0)
