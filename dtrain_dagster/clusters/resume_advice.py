"""Advice for a person whose job has ended before its training was done, on any cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dtrain_dagster.clusters.base import OWNER
from trainer.errors import DamagedError
from trainer.rundir import RunDir

if TYPE_CHECKING:
    from dtrain_dagster.costs.prices import SkuPrice

MOST_SKUS = 2
"""The SKUs with enough memory that are named, the cheapest first."""
GIB = 1 << 30


def how_to_go_on(rundir: RunDir, job_id: str) -> str:
    """Return a sentence that names the kept checkpoint and what resumes from it, or starts over: the command, or for a
    job of a Dagster run its asset."""
    latest = rundir.latest_checkpoint()
    kept = "There is no checkpoint yet"
    if latest:
        kept = f"The checkpoint of step {latest[1]} is kept in {rundir.uri}/{latest[0]}"
    from dtrain_dagster.costs.plan import PLAN, PLANNED_FOR

    owner, plan = _document(rundir, OWNER), _document(rundir, PLAN)
    again = f"run `dtrain train --name {job_id}`"
    if owner.get("dagster_run_id"):
        again = f"materialize {plan.get(PLANNED_FOR, 'its asset')} again"
    return f"{kept}: {again} to {'resume from it' if latest else 'start over'}"


def _document(rundir: RunDir, name: str) -> Mapping[str, Any]:
    """Return a file of the run directory; empty where it is missing or damaged, which others tell."""
    try:
        found = rundir.read_json(name)
    except DamagedError:
        return {}
    return found if isinstance(found, Mapping) else {}


def memory_advice(result: Mapping[str, Any], launch: Mapping[str, Any]) -> str:
    """Return the SKUs whose memory suffices, with their prices, for a job that ended because memory did not; "" for any
    other job. ``result``, ``launch``: the contents of result.json and launch.json."""
    memory = result.get("memory")
    if not isinstance(memory, Mapping) or result.get("launch") not in (None, launch.get("launch")):
        return ""
    from dtrain_dagster.costs.prices import PriceError, price_table

    needed = memory.get("needed_bytes")
    try:
        prices = tuple(price_table().values())
    except PriceError as error:
        return f"which SKU has more memory is not known: {error}"
    larger = name_larger_skus(prices, memory, int(launch.get("processes_per_node") or 1))
    what = "more memory" if needed is None else f"{needed / GIB:.3g} GiB"
    return f"SKUs with {what}: {larger}" if larger else f"no SKU in the table of prices has {what}"


def name_larger_skus(prices: Iterable[SkuPrice], memory: Mapping[str, Any], ranks: int) -> str:
    """Return the cheapest SKUs with the memory that was found to be needed, as words; "" where there is none. Pure.

    ``memory``: ``memory`` of result.json. ``ranks``: processes on each node, which share a host's memory, and take a
    GPU each.
    """
    needed, total = memory.get("needed_bytes"), memory.get("total_bytes") or 0  # nodes wrote them
    on_gpu = memory.get("device") == "cuda"
    found = []
    for price in prices:
        each = price.gpu_memory_gib if on_gpu else price.memory_gib / ranks
        suffices = each * GIB >= needed if needed is not None else each * GIB > total
        if suffices and "dedicated" in price.figures and (not on_gpu or price.gpus >= ranks):
            found.append((price.usd_per_hour("dedicated"), price.sku, each))
    return ", ".join(
        f"{sku} ({each:.3g} GiB for each {'GPU' if on_gpu else 'rank'}, ${usd:.3g} an hour)"
        for usd, sku, each in sorted(found)[:MOST_SKUS]
    )
