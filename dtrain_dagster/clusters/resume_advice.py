"""What a person is told of a job that has ended before its training was done: which process failed first and how, the
end of its log, and how to go on. Which process is to blame is decided in `exit_policy`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dtrain_dagster.clusters.base import OWNER
from dtrain_dagster.clusters.exit_policy import ProcessEnd, describe_exit
from dtrain_dagster.clusters.presence import find_latest_presences
from trainer.errors import DamagedError
from trainer.exit_codes import UNFIT
from trainer.node.line_log import last_lines
from trainer.rundir import LOGS, RunDir

if TYPE_CHECKING:
    from dtrain_dagster.costs.prices import SkuPrice

MOST_SKUS = 2
"""The SKUs with enough memory that are named, the cheapest first."""
GIB = 1 << 30
LOG_TAIL_LINES = 12


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


def explain_failure(rundir: RunDir, launch: Mapping[str, Any], failure: ProcessEnd) -> str:
    """Return the message of a job that ended because one of its processes failed."""
    result = rundir.read_result() or {}
    if result.get("status") == "budget" and result.get("launch") in (None, launch["launch"]):
        return f"{result['error']}. {how_to_go_on(rundir, launch['job_id'])}"
    if memory := memory_advice(result, launch):
        return f"{result['error']}; {memory}. {how_to_go_on(rundir, launch['job_id'])}"
    how, node_id, rank = describe_exit(failure.code), failure.node_id, failure.rank
    if result.get("status") == "failed" and result.get("launch") == launch["launch"] and "node_id" in result:
        # A process says so before it ends; others may end before it, for the job is over.
        node_id = result["node_id"]
        rank = node_id * launch["processes_per_node"] + result.get("local_rank", 0)
    error = f": {str(result['error']).splitlines()[0]}" if rank != failure.rank and result.get("error") else ""
    return f"rank {rank} on node {node_id} failed first ({how}){error}; {_end_of_log(rundir, node_id)}"


def explain_giving_up(
    rundir: RunDir, job_id: str, reason: str, ends: Sequence[ProcessEnd], cause: ProcessEnd | None
) -> str:
    """Return the message of a job that has no nodes left: how each of its processes ended, and how to continue.

    ``cause``: the end of the one whose log is quoted; None where none failed.
    """
    unfit = {end.node_id for end in ends if end.code == UNFIT}
    if unfit:
        failed = {
            f"{node.preflight} (node {node.node_id} on {node.host or 'this machine'})": None
            for node in find_latest_presences(rundir.nodes(skip_damaged=True))
            if node.node_id in unfit and node.preflight
        }
        return (
            f"{reason}: {'; '.join(failed)}. Repair these machines, have the cluster leave them out, or set "
            f"preflight=off in DTRAIN_OPTIONS where a check is wrong. {how_to_go_on(rundir, job_id)}"
        )
    how = "; ".join(f"node {end.node_id}: {describe_exit(end.code)}" for end in ends)
    message = f"{reason} ({how}). {how_to_go_on(rundir, job_id)}"
    return f"{message}; {_end_of_log(rundir, cause.node_id)}" if cause else message


def _end_of_log(rundir: RunDir, node_id: int) -> str:
    said = last_lines(rundir.storage.local_path(f"{LOGS}/node-{node_id}.log"), LOG_TAIL_LINES)
    return f"the end of its log:\n{said}"
