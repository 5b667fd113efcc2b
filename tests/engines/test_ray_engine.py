"""The engine on a real Ray cluster: what it creates, what it says of it, and how it ends it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.ray.engine import RayEngine
from dtrain_dagster.clusters.supervision.engine import EngineJob, EngineUnreachableError
from dtrain_dagster.settings.ray import RaySettings
from harness.engines.ray_cluster import RayCluster, missing
from harness.waiting import until

pytestmark = pytest.mark.slow
IN_ORDER = "trap 'echo ends in order; kill $!; exit 143' TERM; echo node $NODE; sleep 100 & wait"


@pytest.fixture
def launch() -> dict[str, Any]:
    return {"token": os.urandom(24).hex(), "launch": 1, "node_count": 2}


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., RayEngine]]:
    """Makes engines of the cluster, which is started unless the options name another."""
    made: list[RayEngine] = []

    def engine(shell: str = IN_ORDER, **options: Any) -> RayEngine:
        if "address" not in options:
            cluster = request.getfixturevalue("ray_cluster")
            options = {"address": cluster.address, "dashboard": cluster.dashboard} | options
        given = {"cpus": 2.0} | options
        made.append(RayEngine(
            RaySettings(**given), str(tmp_path), lambda launch, node, _: ["/bin/sh", "-c", f"NODE={node}; {shell}"]
        ))  # fmt: skip
        return made[-1]

    yield engine
    for one in made:
        one.close()


def wait_for(engine: RayEngine, launch: dict[str, Any], state: str, count: int = 1) -> list[EngineJob]:
    def found() -> list[EngineJob]:
        jobs = sorted(engine.list_jobs(launch), key=lambda job: job.node_id)
        return jobs if len(jobs) == count and all(job.state == state for job in jobs) else []

    return until(found, f"{count} {state}", pause=0.2)


def wait_for_output(engine: RayEngine, name: str, words: str) -> None:
    until(lambda: words in (engine.read_log(name) or ""), words, pause=0.1)


@pytest.mark.long
def test_nodes_run_once_and_end_in_order_or_at_once(make: Callable[..., RayEngine], launch: dict[str, Any]) -> None:
    engine = make()
    names = [engine.submit(launch, node, 1) for node in range(2)]
    assert make().submit(launch, 0, 1) == names[0], "whoever asks"
    jobs = wait_for(engine, launch, "running", 2)
    assert [(job.id, job.node_id, job.incarnation) for job in jobs] == [(names[0], 0, 1), (names[1], 1, 1)]
    assert all(job.host for job in jobs)
    for node, name in enumerate(names):
        wait_for_output(engine, name, f"node {node}")
    engine.close()  # its driver's end changes nothing
    engine.cancel(names[:1], force=False)
    engine.cancel(names[1:], force=True)
    first, second = wait_for(engine, launch, "ended", 2)
    assert (first.exit_code, first.lost) == (143, False)
    assert "ends in order" in (engine.read_log(names[0]) or "")
    assert "ends in order" not in (engine.read_log(names[1]) or "")
    assert second.lost or second.exit_code == -9
    assert engine.submit(launch, 0, 1) == names[0], "one that has ended is not bought again"
    assert all(job.state == "ended" for job in engine.list_jobs(launch))
    assert engine.list_jobs(launch | {"launch": 2}) == []


@pytest.mark.long
def test_a_machine_may_say_at_which_address(launch: dict[str, Any], tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    with (
        RayCluster(nodes=2, variables={"DTRAIN_HOST": "10.1.0.{index}"}) as cluster,
        pytest.MonkeyPatch.context() as of,
    ):
        for name, value in cluster.access.items():
            of.setenv(name, value)
        options = RaySettings(address=cluster.address, dashboard=cluster.dashboard, cpus=2.0)
        engine = RayEngine(options, str(tmp_path), lambda *_: ["/bin/sh", "-c", 'echo "at $DTRAIN_HOST."'])
        name = engine.submit(launch, 0, 1)
        wait_for_output(engine, name, "at 10.1.0.1.")
        engine.close()


def test_a_cluster_that_is_not_there_is_told(make: Callable[..., RayEngine], launch: dict[str, Any]) -> None:
    engine = make(address="127.0.0.1:9", dashboard=None)
    with pytest.raises(EngineUnreachableError, match="set DTRAIN_RAY_ADDRESS"):
        engine.submit(launch, 0, 1)


@pytest.mark.long
def test_without_a_dashboard_the_cluster_that_was_joined_is_asked(
    make: Callable[..., RayEngine], launch: dict[str, Any], ray_cluster: RayCluster
) -> None:
    """Another cluster runs on this machine."""
    with RayCluster(nodes=1):
        engine = make("true", dashboard=None)
        assert engine.check().startswith(f"{len(ray_cluster.names)} machine")
        engine.submit(launch, 0, 1)
        wait_for(engine, launch, "ended")
