"""The message about a failed job of the local cluster: which process failed first, how, and its last log lines.

`clusters.exit_policy` decides which process is to blame; `supervisor` decides when a job has failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dtrain_dagster.clusters.exit_policy import Failure, describe_exit
from dtrain_dagster.clusters.resume_advice import how_to_go_on, memory_advice
from trainer.node.line_log import last_lines
from trainer.rundir import LOGS, RunDir

LOG_TAIL_LINES = 12


def explain_failure(rundir: RunDir, launch: Mapping[str, Any], failure: Failure) -> str:
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
    rundir: RunDir, job_id: str, reason: str, ends: Sequence[tuple[int, int | None]], cause: Failure | None
) -> str:
    """Return the message of a job that has no nodes left: how each of its processes ended, and how to continue.

    ``ends``: node and exit code of each process. ``cause``: the failure whose log is quoted; None where none failed.
    """
    how = "; ".join(f"node {node_id}: {describe_exit(code)}" for node_id, code in ends if code is not None)
    message = f"{reason} ({how}). {how_to_go_on(rundir, job_id)}"
    return f"{message}; {_end_of_log(rundir, cause.node_id)}" if cause else message


def _end_of_log(rundir: RunDir, node_id: int) -> str:
    said = last_lines(rundir.storage.local_path(f"{LOGS}/node-{node_id}.log"), LOG_TAIL_LINES)
    return f"the end of its log:\n{said}"
