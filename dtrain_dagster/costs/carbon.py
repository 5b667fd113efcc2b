"""The electricity that a job used, and the emissions of its grid: pure arithmetic over presence and samples.

    kWh = paid node time x mean (GPU power + host power) x PUE;   kg CO2e = kWh x intensity of the region's grid

GPU power is the mean of what NVML measured on a node (``node`` events, see `trainer.observability.node_monitor`). Where
nothing was measured it is the rated power times the utilisation, or rated power as it is: an upper bound. Nodes do not
measure the host: it counts by its processors' load. Every constant stands in ``carbon.json`` with its source and year.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any

from dtrain_dagster.costs.prices import hardware_of, region_of
from dtrain_dagster.costs.usage import NodeUsage
from trainer.documents.events import NodeEvent, read_events

_GB_PER_GIB = 2**30 / 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Electricity and emissions of a job, or of a part of its time."""

    kwh: float
    kg_co2e: float | None
    """Emissions in kg of CO2 equivalent; None where the grid is not known."""
    basis: str
    """In words, how the kWh were computed: what was measured, and what was assumed."""
    source: str
    """Source and year of the grid's intensity, or why there is none."""
    measured_share: float
    """Share of the node time in which the GPUs' power was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The hardware of a node that draws power."""

    cores: int
    """Virtual processors."""
    memory_gib: float
    gpu_watts: float
    """Rated power of all GPUs together; 0 where there are none, or none that is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A node's means over its samples; None where nothing was measured."""

    gpu_watts: float | None = None
    gpu_utilization: float | None = None
    load: float | None = None
    """Fractions of 1."""


def footprint(
    usage: Iterable[NodeUsage],
    events: Iterable[Mapping[str, Any]],
    region: str | None,
    machine: Machine | None = None,
) -> Footprint:
    """Return the footprint of paid node time.

    ``events``: of the job, of all kinds. ``region``: of the nodes; None: not known, so there is no CO2. ``machine``:
    for nodes that are groups of processes on one machine, see `this_machine`. Its power counts once for them all,
    instead of that of the SKU whose price is the stand-in. Raise `PriceError` for an unknown SKU.
    """
    intervals = [item for item in usage if item.ended_at > item.started_at]
    drawn = _means(events)
    if machine is not None:
        changes = sorted({moment for item in intervals for moment in (item.started_at, item.ended_at)})
        parts = [
            (end - begin, machine, [drawn.get(node, Drawn()) for node in present])
            for begin, end in pairwise(changes)
            if (present := {item.node_id for item in intervals if item.started_at <= begin < item.ended_at})
        ]
    else:
        parts = [
            (item.ended_at - item.started_at, _machine_of(item.sku), [drawn.get(item.node_id, Drawn())])
            for item in intervals
        ]
    usual_load = 1.0 if machine is not None else _table()["host"]["usual_load"]
    joules = sum(seconds * _watts(each, told, usual_load) for seconds, each, told in parts)
    measured = sum(seconds for seconds, _, told in parts if any(item.gpu_watts is not None for item in told))
    whole = sum(seconds for seconds, _, _ in parts)
    share = measured / whole if whole else 0.0
    pue = 1.0 if machine is not None else _table()["datacentre"]["pue"]
    kwh = joules / 3.6e6 * pue
    grams, source = _grid(region)
    return Footprint(
        kwh=kwh,
        kg_co2e=None if grams is None else kwh * grams / 1000,
        basis=_basis(share, machine, pue),
        source=source,
        measured_share=share,
    )


def job_footprint(usage: Iterable[NodeUsage], events: Iterable[Mapping[str, Any]], is_local: bool) -> Footprint:
    """Return the footprint of a job on this machine's own nodes, or on those of ``DTRAIN_REGION``; raise as `footprint`
    does."""
    if is_local:
        return footprint(usage, events, None, this_machine())
    return footprint(usage, events, region_of())


def this_machine() -> Machine:
    """Return the machine of this process. Its GPUs count only where they were measured."""
    import psutil

    return Machine(cores=os.cpu_count() or 1, memory_gib=psutil.virtual_memory().total / 2**30, gpu_watts=0.0)


def _watts(machine: Machine, told: Sequence[Drawn], usual_load: float) -> float:
    """Return the watts of a machine with the nodes on it. Each of these nodes sees the same GPUs, and its own share of
    the processors."""
    measured = [item.gpu_watts for item in told if item.gpu_watts is not None]
    utilization = [item.gpu_utilization for item in told if item.gpu_utilization is not None]
    gpus = max(measured) if measured else machine.gpu_watts * max(utilization, default=1.0)
    loads = sum(usual_load if item.load is None else item.load for item in told)
    host = _table()["host"]
    idle, busy = host["idle_watts_per_vcpu"], host["busy_watts_per_vcpu"]
    processors = machine.cores * (idle + min(1.0, loads) * (busy - idle))
    return gpus + processors + machine.memory_gib * _GB_PER_GIB * host["watts_per_gb"]


def _means(events: Iterable[Mapping[str, Any]]) -> dict[int, Drawn]:
    by_node: dict[int, list[NodeEvent]] = defaultdict(list)
    for event in read_events(NodeEvent, events):
        by_node[event.node_id].append(event)

    def mean(figures: Iterable[Any], most: float = math.inf) -> float | None:
        """Return the mean of the figures that can be one: finite, and not negative."""
        numbers = (float(value) for value in figures if isinstance(value, int | float) and 0 <= value < math.inf)
        values = [min(value, most) for value in numbers]
        return statistics.fmean(values) if values else None

    def share(percent: float | None) -> float | None:
        return None if percent is None else percent / 100

    return {
        node: Drawn(
            gpu_watts=mean(item.gpu_power_watts for item in looks),
            gpu_utilization=share(mean((item.gpu_utilization for item in looks), 100.0)),
            load=share(mean((item.cpu_percent for item in looks), 100.0)),
        )
        for node, looks in by_node.items()
    }


@cache
def _machine_of(sku: str) -> Machine:
    made = hardware_of(sku)
    return Machine(cores=made.vcpus, memory_gib=made.memory_gib, gpu_watts=made.gpus * made.gpu_watts)


@cache
def _table() -> dict[str, Any]:
    return json.loads(resources.files("dtrain_dagster.costs").joinpath("carbon.json").read_text())


def _grid(region: str | None) -> tuple[float | None, str]:
    """Grams of CO2e per kWh, and the words for it."""
    if region is None:
        return None, "the location of the machine is not known, and so neither is its grid: kWh only"
    row = _table()["regions"].get(region_of(region))
    if row is None:
        return None, f"the grid of region {region!r} is not in the table: kWh only"
    origin = _table()["sources"][row["source"]]
    return row["g_per_kwh"], f"{row['place']}: {row['g_per_kwh']:g} g/kWh in {origin['year']}, {origin['source']}"


def _basis(share: float, machine: Machine | None, pue: float) -> str:
    host = _table()["host"]
    origin = _table()["sources"]
    hosts = (
        f"by load at {host['idle_watts_per_vcpu']} to {host['busy_watts_per_vcpu']} W per virtual processor and "
        f"{host['watts_per_gb']} W per GB of memory ({origin[host['source']]['source']})"
    )
    if machine is not None:
        gpus = "; GPU power was measured" if share else ""
        return (
            f"an estimate for this one machine, not of the SKU whose price stands in: {machine.cores} processors "
            f"{hosts}{gpus}; no PUE"
        )
    return (
        f"GPU power measured on nodes of {share:.0%} of the node time, else rated power (an upper bound where the "
        f"utilisation is not known); hosts {hosts}; times a PUE of {pue} "
        f"({origin[_table()['datacentre']['source']]['source']})"
    )
