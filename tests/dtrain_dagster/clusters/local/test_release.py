"""Nodes that have nothing more to do at the end of a training are released, and paid for only until then.

The trainer itself runs, on nodes of the local cluster.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.clusters.supervision.launch import LaunchSettings
from dtrain_dagster.jobs.start import start_job
from harness.small_job import write_dataset
from harness.waiting import until
from trainer.config import DatasetRef, DistributedTrainingConfig, JobConfig, TrackingConfig
from trainer.rundir import RunDir

pytestmark = pytest.mark.slow
STEPS = 12


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data"))


def begin(
    cluster: Any, dataset: Path, job_id: str, *faults: dict[str, Any], delay: float = 5.0, nodes: int = 3
) -> RunDir:
    """Begin to train with these faults; the run directory of the job. ``delay``: seconds that a node is gone before
    another takes its place."""
    manager = cluster.manager = LocalClusterManager(
        cluster.manager.home, LaunchSettings(replacement_delay_seconds=delay)
    )
    rundir = RunDir(str(cluster.run_dir(job_id)))
    job = JobConfig(
        job_id=job_id,
        run_dir=rundir.uri,
        dataset=DatasetRef(uri=str(dataset)),
        training=DistributedTrainingConfig(
            world_size=nodes, max_steps=STEPS, warmup_steps=2, checkpoint_frequency=5, threads_per_rank=1
        ),
        tracking=TrackingConfig(tensorboard=False),
    )
    env = {"DTRAIN_FAULTS": json.dumps(faults), "DTRAIN_CACHE": str(cluster.folder / "cache")}
    start_job(manager, job, nodes, 1, env)
    return rundir


def assert_succeeded(cluster: Any, job_id: str) -> None:
    status = cluster.wait(job_id)
    assert status.state is JobState.SUCCEEDED, status.message


def test_nodes_leave_when_they_have_nothing_more_to_do_and_are_paid_for_until_then(cluster, dataset):
    go = cluster.folder / "go"
    work = {"kind": "sleep", "at": "alone", "node": 0, "seconds": 600.0, "until": str(go)}
    rundir = begin(cluster, dataset, "leaves", work, nodes=2)

    def ended() -> dict[int, float | None]:
        return {node.node_id: node.ended_at for node in rundir.nodes()}

    until(lambda: ended().get(1), "the end of the node that has nothing to do: rank 0 works meanwhile")
    assert ended()[0] is None, rundir.nodes()
    go.touch()
    assert_succeeded(cluster, "leaves")
    ends = ended()
    assert ends.keys() == {0, 1}
    assert all(node.exit_codes == (0,) for node in rundir.nodes())
    assert ends[0] > ends[1]
    usage = {item.node_id: item for item in cluster.manager.node_usage("leaves")}
    assert {node: item.ended_at for node, item in usage.items()} == ends, "the bill ends with the node"
    assert rundir.last_generation() == 1, "nobody took the end of the other for a loss"
    stages = [item["stage"] for item in rundir.events("finish")]
    assert stages == ["test split", "baselines", "report", "model"]
    assert rundir.read_json("result.json")["world_size"] == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("delay", "places"),
    [
        pytest.param(90.0, [(1, 0), (1, 1), (1, 2), (2, 0)], id="when the others have left"),
        pytest.param(0.0, None, id="while the others leave"),
    ],
)
def test_a_rank_0_that_is_lost_when_it_works_alone_is_replaced_by_one_node(cluster, dataset, delay, places):
    rundir = begin(cluster, dataset, "lost", {"kind": "kill", "at": "alone", "node": 0}, delay=delay)
    assert_succeeded(cluster, "lost")
    codes = {(node.launch, node.node_id, node.incarnation): node.exit_codes for node in rundir.nodes()}
    assert sorted(codes.values()) == [(-9,), (0,), (0,), (0,)]
    assert codes[1, 0, 1] == (-9,)
    assert places is None or [(launch, node) for launch, node, _ in codes] == places, "one node, in a launch of its own"
    assert {item["step"] for item in rundir.events("resume")} <= {STEPS}, "no step is done again"
    again = rundir.read_json("result.json")
    undisturbed = begin(cluster, dataset, "whole")
    assert_succeeded(cluster, "whole")
    whole = undisturbed.read_json("result.json")
    assert again["weights_sha256"] == whole["weights_sha256"]
    assert again["test"] == pytest.approx(whole["test"], rel=1e-9)
