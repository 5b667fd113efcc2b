"""Each operation of Azure Resource Manager is held against the roles of deploy/azure: they suffice, and where an action
is missing the error names it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.azure_ml import jobs
from dtrain_dagster.clusters.azure_ml.doctor import NEEDED_OPERATIONS
from dtrain_dagster.clusters.base import ClusterError, JobState
from harness.azure.emulator.permissions import granted_actions
from harness.waiting import until
from tests.azure.stage import FOREVER, V100, Stage

ML = "Microsoft.MachineLearningServices"
OURS = f"/subscriptions/s/resourceGroups/g/providers/{ML}/workspaces/w"
OF_A_STEP = {
    "provision": [
        f"{ML}/workspaces/read",
        f"{ML}/workspaces/computes/read",
        f"{ML}/locations/vmSizes/read",
        f"{ML}/locations/usages/read",
        f"{ML}/workspaces/computes/write",
    ],
    "submit": [
        f"{ML}/workspaces/codes/versions/read",
        f"{ML}/workspaces/codes/versions/write",
        f"{ML}/workspaces/environments/versions/write",
        f"{ML}/workspaces/jobs/read",
        f"{ML}/workspaces/jobs/write",
    ],
    "look": [f"{ML}/workspaces/computes/listNodes/action"],
    "cancel": [f"{ML}/workspaces/jobs/cancel/action"],
    "clean up": [f"{ML}/workspaces/computes/delete", f"{ML}/locations/computeOperationsStatus/read"],
}
"""Actions that a training asks for, from its nodes to their end, by the first step that cannot do without them."""
OF_A_TRAINING = {action for actions in OF_A_STEP.values() for action in actions}


def steps(stage: Stage) -> dict[str, Callable[[], Any]]:
    """Nodes, a job, a look through the workspace, and the end of it all."""
    manager = stage.manager(look_patience_seconds=3.0)
    spec = stage.spec(manager, FOREVER)

    def look() -> None:
        manager.job_status(spec.job_id)
        manager.pools()
        manager.find_orphans({"run-1"})

    def cancel() -> None:
        manager.cancel_job(spec.job_id)
        until(lambda: manager.job_status(spec.job_id).state is JobState.CANCELLED, "the end of the cancellation")

    return {
        "provision": lambda: manager.provision_cluster(2, V100),
        "submit": lambda: manager.submit_job(spec),
        "look": look,
        "cancel": cancel,
        "clean up": manager.cleanup_cluster,
    }


@pytest.mark.slow
def test_the_roles_suffice_and_the_error_names_the_action_that_is_missing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is tried without each of its actions, and then with all of them."""
    before = len(stage.control("requests"))

    def stage_new_code(folder: Path, *of_the_job: Any) -> None:
        (folder / "new.txt").write_text(uuid.uuid4().hex)

    monkeypatch.setattr(jobs, "stage_for_nodes", stage_new_code)  # code that the workspace has is not sent again
    for name, step in steps(stage).items():
        for action in OF_A_STEP[name]:
            stage.control("deny", actions=[action])
            with pytest.raises(ClusterError) as caught:
                step()
            assert f"'{action}'" in str(caught.value)
            assert "deploy/azure lists what each one needs" in str(caught.value)
        stage.control("deny", actions=[])
        step()
    seen = [request for request in stage.control("requests")[before:] if request["action"]]
    assert {request["action"] for request in seen} == OF_A_TRAINING
    assert {action.lower() for action in OF_A_TRAINING} - {name.lower() for name in NEEDED_OPERATIONS} <= {
        f"{ML}/workspaces/{name}/read".lower() for name in ("codes/versions", "computes", "jobs")
    } | {f"{ML}/locations/{name}/read".lower() for name in ("computeOperationsStatus", "usages", "vmSizes")}


def test_nodes_may_neither_buy_nor_cancel() -> None:
    nodes = granted_actions("node")
    assert f"{ML}/workspaces/experiments/runs/write" in nodes
    assert not [name for name in nodes if "/computes/" in name or "/jobs/" in name]
