"""The sensors' decisions."""

import pytest

from dtrain_dagster.clusters.base import ClusterHealth, JobState, JobStatus, NodeHealth
from dtrain_dagster.monitoring.advice import decide_idle

NODE = NodeHealth(node_id=0, healthy=True)


@pytest.mark.parametrize(
    ("nodes", "running", "last_end", "ready_since", "idle_seconds", "scale_down"),
    [
        ((), (), None, 0.0, 0.0, False),  # no nodes: nothing is paid for
        ((NODE,), ("train-1",), 100.0, 0.0, 0.0, False),
        ((NODE,), (), 900.0, 0.0, 100.0, False),
        ((NODE,), (), 300.0, 0.0, 700.0, True),
        ((NODE,), (), None, 200.0, 800.0, True),
        ((NODE,), (), 300.0, 950.0, 50.0, False),  # made ready again after the last job
    ],
)
def test_idle(nodes, running, last_end, ready_since, idle_seconds, scale_down):
    health = ClusterHealth(cluster_name="local", healthy=True, nodes=nodes, running_jobs=running)
    jobs = [JobStatus(job_id="train-0", state=JobState.SUCCEEDED, ended_at=last_end)]
    decision = decide_idle(health, jobs, ready_since, now=1000.0, limit_seconds=600)
    assert (decision.idle_seconds, decision.scale_down) == (idle_seconds, scale_down)
