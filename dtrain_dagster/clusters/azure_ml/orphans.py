"""Jobs and computes of ours that nobody wants any more. What is done about them is decided by policy elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def why_orphaned(
    job_name: str,
    record: Mapping[str, Any] | None,
    is_settled: bool,
    owner: str | None,
    live_runs: Collection[str],
) -> str:
    """Why a job that runs in the service is nobody's; "" if it is somebody's. Pure.

    ``record``: ``launch.json`` of its run directory, None if there is none; ``is_settled``: the run directory says that
    the job has ended; ``owner``: the Dagster run that followed it last, None for a job without one,
    which a person owns.
    """
    if record is None:
        return "its run directory is gone"
    if record.get("job_name") != job_name:
        return f"launch {record.get('launch')} ({record.get('job_name')}) has taken its place"
    if is_settled:
        return "its run directory says that it has ended"
    if record.get("cancel_asked_at"):
        return "it was to be cancelled"
    if owner is not None and owner not in live_runs:
        return f"no live Dagster run follows it; the last was {owner}"
    return ""


def why_compute_orphaned(state: str, idle_nodes: int, busy_nodes: int, minimum: int, wanted: bool) -> str:
    """Why a compute costs money for nobody; "" if it does not. Pure. ``wanted``: a job of ours waits for it or runs,
    which goes on and would be ended with the compute, whatever state that is in."""
    if wanted:
        return ""
    if state in ("Failed", "Canceled"):
        return f"it is {state}"
    if minimum > 0:
        return f"it keeps {minimum} nodes whatever there is to do"
    if idle_nodes + busy_nodes:
        return f"{idle_nodes} nodes idle and {busy_nodes} are at work, and no job of ours is there"
    return ""
