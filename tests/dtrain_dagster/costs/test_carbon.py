"""The footprint is arithmetic, checked by hand-made numbers and by properties."""

from __future__ import annotations

import os
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain_dagster.costs.carbon import HOLD_SECONDS, Machine, footprint, this_machine
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
    events = [
        sample(0, 100.0, gpu_power_watts=200.0, cpu_percent=100.0),  # for the time from 0 on
        sample(0, 160.0, gpu_power_watts=100.0, cpu_percent=0.0),
        sample(0, 1000.0, gpu_power_watts=None, gpu_utilization=40.0, cpu_percent=None),  # from 880 on
        {"kind": "step", "time": 50.0, "step": 1},
    ]
    found = footprint([there(0, 0.0, 1100.0)], events, "eastus")
    joules = (
        100 * (200 + host_watts(1))
        + 60 * (100 + host_watts(0))
        + HOLD_SECONDS * (0.4 * 250 + host_watts(0.5))
        + (1100 - 160 - HOLD_SECONDS) * (250 + host_watts(0.5))  # nobody looked: full rated power, usual load
        + 1100 * MEMORY_WATTS
    )
    assert found.kwh == pytest.approx(joules / 3.6e6 * 1.18)
    assert found.kg_co2e == pytest.approx(found.kwh * 0.2448)
    assert found.measured_share == pytest.approx(160 / 1100)
    assert "measured in 15% of the node time" in found.basis
    assert "PUE of 1.18" in found.basis
    assert "Virginia, US: 244.8 g/kWh in 2023, US EPA eGRID2023" in found.source
    assert footprint([there(0, 0.0, 1100.0)], events, "West Europe").kg_co2e == pytest.approx(found.kwh * 0.2676)


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


watts = st.one_of(st.none(), st.floats(0, 800), st.just(float("inf")))
percent = st.one_of(st.none(), st.floats(-5000, 140), st.just(float("nan")))
nodes = st.integers(0, 2)
events = st.lists(
    st.builds(
        lambda node_id, time, power, use, load: sample(
            node_id, time, gpu_power_watts=power, gpu_utilization=use, cpu_percent=load
        ),
        nodes, st.integers(0, 1000), watts, percent, percent,
    ),
    max_size=25,
    unique_by=lambda event: (event["node_id"], event["time"]),
)  # fmt: skip
intervals = st.lists(
    st.builds(lambda node_id, begin, length: there(node_id, begin, begin + length), nodes, st.floats(0, 1000),
              st.floats(-50, 1000)),
    max_size=6,
)  # fmt: skip


@given(intervals, events, st.lists(st.floats(0, 2000), max_size=4), st.sampled_from([None, LAPTOP]), st.randoms())
def test_it_is_never_negative_adds_up_over_time_and_counts_nothing_twice(
    usage, told, cuts, machine, rng: random.Random
):
    whole = footprint(usage, told, "eastus", machine)
    assert whole.kwh >= 0
    assert 0 <= whole.measured_share <= 1
    edges = [0.0, *sorted(cuts), 1e6]
    parts = 0.0
    for begin, end in pairwise(edges):
        clipped = [there(one.node_id, max(begin, one.started_at), min(end, one.ended_at)) for one in usage]
        parts += footprint(clipped, told, "eastus", machine).kwh
    assert parts == pytest.approx(whole.kwh, rel=1e-9, abs=1e-12)
    again = [*told, *told]  # events that were written, or read, twice; in any order
    rng.shuffle(again)
    assert footprint(usage, again, "eastus", machine).kwh == pytest.approx(whole.kwh)
    paid = [one for one in usage if one.ended_at > one.started_at]
    if machine is None:
        each = sum(footprint([one], told, "eastus").kwh for one in paid)
        assert each == pytest.approx(whole.kwh)
    elif paid:
        span = max(one.ended_at for one in paid) - min(one.started_at for one in paid)
        assert whole.kwh * 3.6e6 <= span * (800 + host_watts(1, cores=8)) * (1 + 1e-9)
