"""The footprint is arithmetic, checked by hand-made numbers and by properties."""

from __future__ import annotations

import os
from typing import Any

import pytest

from dtrain_dagster.costs.carbon import Machine, footprint, this_machine
from dtrain_dagster.costs.prices import PriceError, known_regions
from dtrain_dagster.costs.usage import NodeUsage
from trainer.observability.node_monitor import NodeMonitor
from trainer.observability.reporter import Reporter
from trainer.rundir import RunDir

SKU = "Standard_NC6s_v3"  # 6 vCPUs, 112 GiB, one V100 of 250 W
MEMORY_WATTS = 112 * 2**30 / 1e9 * 0.392
LAPTOP = Machine(cores=8, memory_gib=0.0, gpu_watts=0.0)


def there(node_id: int, begin: float, end: float, sku: str = SKU) -> NodeUsage:
    return NodeUsage(node_id=node_id, sku=sku, started_at=begin, ended_at=end)


def sample(node_id: int, time: float, **figures: float | None) -> dict[str, Any]:
    return {"kind": "node", "node_id": node_id, "time": time, **figures}


def host_watts(load: float, cores: int = 6) -> float:
    return cores * (0.74 + load * (3.54 - 0.74))


def test_measured_power_counts_where_there_is_any_and_rated_power_elsewhere():
    usage = [there(0, 0.0, 1000.0), there(1, 0.0, 500.0), there(2, 100.0, 600.0)]
    events = [
        sample(0, 100.0, gpu_power_watts=200.0, cpu_percent=100.0),
        sample(0, 160.0, gpu_power_watts=100.0, cpu_percent=0.0),
        sample(1, 100.0, gpu_power_watts=None, gpu_utilization=40.0, cpu_percent=None),
        {"kind": "step", "time": 50.0, "step": 1},
    ]
    found = footprint(usage, events, "eastus")
    joules = (
        1000 * (150 + host_watts(0.5))
        + 500 * (0.4 * 250 + host_watts(0.5))
        + 500 * (250 + host_watts(0.5))  # nobody looked: full rated power, usual load
        + 2000 * MEMORY_WATTS
    )
    assert found.kwh == pytest.approx(joules / 3.6e6 * 1.18)
    assert found.kg_co2e == pytest.approx(found.kwh * 0.2448)
    assert found.measured_share == pytest.approx(1000 / 2000)
    assert "measured on nodes of 50% of the node time" in found.basis
    assert "PUE of 1.18" in found.basis
    assert "Virginia, US: 244.8 g/kWh in 2023, US EPA eGRID2023" in found.source
    assert footprint(usage, events, "West Europe").kg_co2e == pytest.approx(found.kwh * 0.2676)


def test_every_region_with_a_price_has_a_grid_and_an_unknown_one_gives_kwh_only():
    usage = [there(0, 0.0, 3600.0)]
    for region in known_regions():
        assert footprint(usage, [], region).kg_co2e
    unknown = footprint(usage, [], "moonbase")
    assert unknown.kwh > 0.25
    assert unknown.kg_co2e is None
    assert "'moonbase' is not in the table" in unknown.source
    assert footprint([], [], "eastus").kwh == 0
    with pytest.raises(PriceError, match="Standard_X"):
        footprint([there(0, 0.0, 1.0, "Standard_X")], [], "eastus")


def test_nodes_on_one_machine_share_its_power():
    usage = [there(node_id, 0.0, 100.0) for node_id in range(3)]
    events = [sample(node_id, 100.0, cpu_percent=20.0, gpu_power_watts=60.0) for node_id in range(3)]
    found = footprint(usage, events, None, LAPTOP)
    assert found.kwh == pytest.approx(100 * (60 + host_watts(0.6, cores=8)) / 3.6e6)  # each of them sees the same GPUs
    assert found.kg_co2e is None
    assert "not of the SKU whose price stands in" in found.basis
    left = [there(0, 0.0, 100.0), there(1, 0.0, 10.0), there(1, 50.0, 60.0), there(2, 200.0, 210.0)]
    alone, two = host_watts(0.2, cores=8) + 60, host_watts(0.4, cores=8) + 60
    assert footprint(left, events, None, LAPTOP).kwh == pytest.approx((90 * alone + 20 * two) / 3.6e6)
    full = footprint(usage, [], None, LAPTOP)
    assert full.kwh == pytest.approx(100 * host_watts(1, cores=8) / 3.6e6)  # three nodes that nobody looked at
    assert this_machine().cores >= 1
    assert this_machine().memory_gib > 0.1


def test_what_nodes_report_is_what_is_read(tmp_path):
    """A real monitor and its events as others read them; only the GPU's power is put in, for there may be no GPU."""
    rundir = RunDir(str(tmp_path))
    reporter = Reporter(rundir, 0, 1, [])
    monitor = NodeMonitor(0, reporter, 60.0, [os.getpid()])
    monitor.send_to_dashboard(monitor.sample() | {"cpu_percent": 50.0, "gpu_power_watts": 123.0})
    reporter.close()
    told = list(rundir.events())
    figures = {"gpu_power_watts", "gpu_utilization", "cpu_percent", "node_id", "time"}
    assert figures <= monitor.sample().keys() | told[0].keys()
    now = told[0]["time"]
    found = footprint([there(0, now - 100, now)], told, None, LAPTOP)
    assert found.kwh == pytest.approx(100 * (123 + host_watts(0.5, cores=8)) / 3.6e6)
    assert found.measured_share == 1


def test_figures_that_cannot_be_and_intervals_that_end_before_they_begin_count_nothing():
    strange = [sample(0, 1.0, gpu_power_watts=float("inf"), gpu_utilization=float("nan"), cpu_percent=-5.0)]
    assert footprint([there(0, 0.0, 100.0)], strange, None) == footprint([there(0, 0.0, 100.0)], [], None)
    assert footprint([there(0, 100.0, 0.0)], [], "eastus").kwh == 0
