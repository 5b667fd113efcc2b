"""The message of a failed job: whom it names, and whose log it quotes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.exit_policy import Failure
from dtrain_dagster.clusters.resume_advice import explain_failure
from trainer.rundir import RESULT, RunDir

LAUNCH: dict[str, Any] = {"launch": 2, "job_id": "j", "processes_per_node": 2}


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"launch": 2, "node_id": 0, "local_rank": 1}, "rank 1 on node 0 failed first (exit code 1): OSError: broken;"),
        ({"launch": 2, "node_id": 1, "local_rank": 1}, "rank 3 on node 1 failed first (exit code 1); the end"),
        ({"launch": 1, "node_id": 0, "local_rank": 1}, "rank 3 on node 1 failed first (exit code 1); the end"),
        ({"launch": 2}, "rank 3 on node 1 failed first (exit code 1); the end"),
    ],
)
def test_who_raised_is_named_though_another_process_ended_before_it(
    tmp_path: Path, result: dict[str, Any], said: str
) -> None:
    """The other one ends at once, since the job is over; who raised has yet to write its reports."""
    rundir = RunDir(str(tmp_path))
    for node in (0, 1):
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "logs" / f"node-{node}.log").write_text(f"log of node {node}\n")
    rundir.write_json(RESULT, {"status": "failed", "error": "OSError: broken\nwith more", **result})
    found = explain_failure(rundir, LAUNCH, Failure(rank=3, node_id=1, code=1))
    assert found.startswith(said)
    assert f"log of node {said.split('node ')[1][0]}" in found
