"""The electricity that a job used, and the emissions of its grid: pure arithmetic over presence and samples.

    kWh = sum over node time of (GPU power + host power) x PUE;   kg CO2e = kWh x intensity of the region's grid

GPU power is what NVML measured on the nodes (``node`` events, see `trainer.observability.node_monitor`). Where nothing
was measured it is the rated power times the utilisation, or rated power as it is: an upper bound. Nodes do not measure
the host: it counts by its processors' load. Every constant stands in ``carbon.json`` with its source and year.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left, bisect_right
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

HOLD_SECONDS = 120.0
"""Longest time before a sample, in seconds, that the sample speaks for; it begins at the previous sample."""
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
class _Sample:
    time: float
    gpu_watts: float | None
    gpu_utilization: float | None
    load: float | None
    """Fractions of 1."""


@dataclass(slots=True)
class _Sum:
    joules: float = 0.0
    seconds: float = 0.0
    measured_seconds: float = 0.0


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
    intervals = list(usage)
    samples = _samples(events)
    total = _Sum()
    if machine is not None:
        _add(total, intervals, samples, machine, usual_load=1.0)
    else:
        for interval in intervals:
            _add(total, [interval], samples, _machine_of(interval.sku), usual_load=_table()["host"]["usual_load"])
    share = total.measured_seconds / total.seconds if total.seconds else 0.0
    pue = 1.0 if machine is not None else _table()["datacentre"]["pue"]
    kwh = total.joules / 3.6e6 * pue
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


def _add(
    total: _Sum,
    intervals: Sequence[NodeUsage],
    samples: Mapping[int, Sequence[_Sample]],
    machine: Machine,
    usual_load: float,
) -> None:
    """Add the energy that one machine used while any of these intervals lasted. Between two neighbouring points of time
    at which something changes, power is constant. An interval that ends before it begins, as clocks step, counts
    nothing."""
    points = {point for interval in intervals for point in (interval.started_at, interval.ended_at)}
    for interval in intervals:
        points.update(_changes(samples.get(interval.node_id, ()), interval.started_at, interval.ended_at))
    ordered = sorted(points)
    for begin, end in pairwise(ordered):
        middle = (begin + end) / 2
        present = {interval.node_id for interval in intervals if interval.started_at <= middle < interval.ended_at}
        if not present:
            continue
        told = [_speaking(samples.get(node_id, ()), middle) for node_id in present]
        watts, is_measured = _watts(machine, told, usual_load)
        total.joules += watts * (end - begin)
        total.seconds += end - begin
        total.measured_seconds += (end - begin) * is_measured


def _changes(samples: Sequence[_Sample], begin: float, end: float) -> Iterable[float]:
    """Yield the points within that time at which another sample begins to count, or one without a predecessor."""
    first = bisect_right(samples, begin, key=_time)
    for index in range(first, len(samples)):
        time = samples[index].time
        since = time - HOLD_SECONDS
        if begin < since < end and (index == 0 or samples[index - 1].time < since):
            yield since
        if time >= end:
            return
        yield time


def _speaking(samples: Sequence[_Sample], when: float) -> _Sample | None:
    """The sample that speaks for a point of time: the next one, if it is near."""
    index = bisect_left(samples, when, key=_time)
    return samples[index] if index < len(samples) and samples[index].time - when <= HOLD_SECONDS else None


def _watts(machine: Machine, told: Sequence[_Sample | None], usual_load: float) -> tuple[float, bool]:
    """Return the watts of a machine with the samples of the nodes on it, and whether the GPUs' part was measured. Each
    of these nodes sees the same GPUs, and its own share of the processors."""
    known = [sample for sample in told if sample]
    measured = [sample.gpu_watts for sample in known if sample.gpu_watts is not None]
    utilization = [sample.gpu_utilization for sample in known if sample.gpu_utilization is not None]
    gpus = max(measured) if measured else machine.gpu_watts * max(utilization, default=1.0)
    loads = [usual_load if sample is None or sample.load is None else sample.load for sample in told]
    host = _table()["host"]
    idle, busy = host["idle_watts_per_vcpu"], host["busy_watts_per_vcpu"]
    processors = machine.cores * (idle + min(1.0, sum(loads)) * (busy - idle))
    memory = machine.memory_gib * _GB_PER_GIB * host["watts_per_gb"]
    return gpus + processors + memory, bool(measured)


def _samples(events: Iterable[Mapping[str, Any]]) -> dict[int, list[_Sample]]:
    """Return the samples by node, in order of time, one for each point of time."""
    found: dict[int, dict[float, _Sample]] = defaultdict(dict)
    for event in read_events(NodeEvent, events):
        load, utilization = _number(event.cpu_percent), _number(event.gpu_utilization)
        found[event.node_id][event.time] = _Sample(
            time=event.time,
            gpu_watts=_number(event.gpu_power_watts),
            gpu_utilization=None if utilization is None else min(1.0, utilization / 100),
            load=None if load is None else min(1.0, load / 100),
        )
    return {node_id: [by_time[time] for time in sorted(by_time)] for node_id, by_time in found.items()}


def _number(value: Any) -> float | None:
    """A figure that can be one: finite, and not negative."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value >= 0 else None


def _time(sample: _Sample) -> float:
    return sample.time


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
        gpus = f"; GPU power was measured in {share:.0%} of the time" if share else ""
        return (
            f"an estimate for this one machine, not of the SKU whose price stands in: {machine.cores} processors "
            f"{hosts}{gpus}; no PUE"
        )
    return (
        f"GPU power measured in {share:.0%} of the node time, else rated power (an upper bound where the utilisation "
        f"is not known); hosts {hosts}; times a PUE of {pue} ({origin[_table()['datacentre']['source']]['source']})"
    )
