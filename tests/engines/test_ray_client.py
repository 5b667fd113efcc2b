"""The engine through Ray Client, as with a RayCluster of KubeRay: from outside of the cluster, over one port of its
head."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.ray.engine import RayEngine
from dtrain_dagster.clusters.supervision.engine import EngineJob, EngineUnreachableError
from dtrain_dagster.settings.ray import RaySettings
from harness.engines.ray_cluster import RayCluster
from harness.waiting import until
from trainer.runtime.parent_death import die_with

pytestmark = [pytest.mark.slow, pytest.mark.long]
IN_ORDER = "trap 'echo ends in order; kill $!; exit 143' TERM; echo begun; sleep 100 & wait"


class ClientServer:
    """Ray's own server for clients, as the head of a RayCluster runs one."""

    def __init__(self, cluster: RayCluster, folder: Path) -> None:
        self.cluster, self.log = cluster, folder / "client.log"
        host = cluster.address.rpartition(":")[0]
        with socket.create_server((host, 0)) as free:
            self.host, self.port = host, free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            *(sys.executable, "-W", "ignore", "-m", "ray.util.client.server", f"--address={self.cluster.address}"),
            *(f"--host={self.host}", f"--port={self.port}", "--mode=proxy"),
        ]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **self.cluster.access},
                preexec_fn=partial(die_with, os.getpid()),
            )  # fmt: skip
        until(self.is_reached, self.log.read_text, 120, pause=0.2)

    def is_reached(self) -> bool:
        with suppress(OSError):
            socket.create_connection((self.host, self.port), 1).close()
            return True
        return False

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
def server(ray_cluster: RayCluster, tmp_path: Path) -> Iterator[ClientServer]:
    made = ClientServer(ray_cluster, tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def wait_for(engine: RayEngine, launch: dict[str, Any], state: str) -> EngineJob:
    def found() -> list[EngineJob]:
        with suppress(EngineUnreachableError):
            return [job for job in engine.list_jobs(launch) if job.state == state]
        return []

    [job] = until(found, state, 180, pause=0.5)
    return job


def is_noticed(engine: RayEngine, launch: dict[str, Any]) -> bool:
    """Whether the engine says that it is not reached: a client notices it at its next request, or at a later one."""
    for _ in range(30):
        try:
            engine.list_jobs(launch)
        except EngineUnreachableError:
            return True
        time.sleep(1)
    return False


def test_a_node_outlives_the_connection_and_ends_in_order(
    server: ClientServer, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    launch: dict[str, Any] = {"token": os.urandom(24).hex(), "launch": 1, "node_count": 1}
    options = RaySettings(address=f"ray://{server.host}:{server.port}", dashboard=ray_cluster.dashboard, cpus=1.0)
    engine = RayEngine(options, str(tmp_path), lambda *_: ["/bin/sh", "-c", IN_ORDER])
    try:
        assert engine.check().startswith(f"{len(ray_cluster.names)} machine")
        name = engine.submit(launch, 0, 1)
        assert engine.submit(launch, 0, 1) == name
        wait_for(engine, launch, "running")
        until(lambda: "begun" in (engine.read_log(name) or ""), "its output", 120, pause=0.1)
        server.stop()
        assert is_noticed(engine, launch), "the connection is lost"
        server.start()
        assert wait_for(engine, launch, "running").id == name, "a detached actor outlives its client"
        engine.cancel([name], force=False)
        job = wait_for(engine, launch, "ended")
        assert (job.exit_code, job.lost) == (143, False)
        assert (engine.read_log(name) or "").splitlines() == ["begun", "ends in order"]
    finally:
        engine.close()
