"""A small training on the test cluster: one rank per pod, and a loop in the place of a supervisor that replaces nodes
which the engine says are lost."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.kubernetes.engine import KubernetesEngine
from dtrain_dagster.clusters.supervision.engine import EngineJob, EngineUnreachableError
from tests.engines.kubernetes_access import make_options
from tests.engines.kubernetes_image import host_volumes
from trainer.config import DatasetRef, DistributedTrainingConfig, JobConfig, TrackingConfig
from trainer.node.environment import Seat, rank_environment
from trainer.rundir import RunDir

NODES = 2
USER = 1000
WAIT_SECONDS = 240.0


def write_job(folder: Path, steps: int) -> RunDir:
    """A job and its dataset, in a folder that the pods' user may write to."""
    path = Path(__file__).parents[1] / "dtrain_dagster" / "small_job.py"
    spec = importlib.util.spec_from_file_location("small_job", path)
    assert spec is not None
    assert spec.loader is not None
    small_job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(small_job)
    dataset = small_job.write_dataset(folder / "dataset")
    rundir = RunDir(str(folder / "storage" / "jobs" / "one"))
    training = DistributedTrainingConfig(
        world_size=NODES, max_steps=steps, epochs=10_000, warmup_steps=5, threads_per_rank=1, batch_size_per_gpu=64,
        checkpoint_frequency=1000, keep_checkpoints=1, eval_frequency=steps, bind_cores=False,
        learning_rate=1e-4,  # where rounding of sums is not blown up over many steps, as it is by chaos
    )  # fmt: skip
    rundir.write_job(JobConfig(
        job_id="one", run_dir=rundir.uri, dataset=DatasetRef(uri=str(dataset)), training=training,
        tracking=TrackingConfig(tensorboard=False),
    ))  # fmt: skip
    for root, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            os.chown(os.path.join(root, name), USER, USER)
    return rundir


class Training:
    """The nodes of one launch."""

    def __init__(self, kubeconfig: Path, folder: Path, steps: int) -> None:
        self.rundir = write_job(folder, steps)
        self.launch: dict[str, Any] = {
            "job_id": "one", "token": os.urandom(24).hex(), "launch": 1, "node_count": NODES, "processes_per_node": 1,
            "elastic": True, "env": {}, "threads_per_rank": 1,
        }  # fmt: skip
        volumes = [
            {"mount": path, "source": {"hostPath": {"path": path}}, "read_only": read_only}
            for path, read_only in host_volumes(folder)
        ]
        options = make_options(kubeconfig, volumes=volumes, memory="1Gi", user=USER, spread="prefer")
        self.engine = KubernetesEngine(options, self.rundir.uri, self._command)
        self.jobs: dict[int, EngineJob] = {}
        """The newest incarnation of each node."""

    def start(self) -> None:
        for node in range(NODES):
            self.engine.submit(self.launch, node, 1)

    def step(self) -> int:
        """The last step that was told."""
        return max((event["step"] for event in self.rundir.events("step")), default=0)

    def run_until(self, holds: Callable[[], object]) -> None:
        """Look at the nodes and replace lost ones until this holds. The output of all goes into the error if it takes
        too long, or if a node fails."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not holds():
            with contextlib.suppress(EngineUnreachableError):
                self._look()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.2)

    def is_over(self) -> bool:
        return len(self.jobs) == NODES and all(job.state == "ended" for job in self.jobs.values())

    def said(self) -> str:
        return "\n".join(f"{job}\n{self.engine.read_log(job.id)}" for job in self.jobs.values())

    def _look(self) -> None:
        for job in sorted(self.engine.list_jobs(self.launch), key=lambda job: job.incarnation):
            self.jobs[job.node_id] = job
        for job in list(self.jobs.values()):
            if job.lost:
                self.engine.cancel([job.id], force=True)
                self.engine.submit(self.launch, job.node_id, job.incarnation + 1)
            else:
                assert job.exit_code in (None, 0), self.said()

    def _command(self, launch: Mapping[str, Any], node_id: int, incarnation: int) -> Sequence[str]:
        seat = Seat(node_id=node_id, incarnation=incarnation, master_addr="10.77.0.1", master_port=29500, is_alone=True)
        own = {name: value for name, value in rank_environment(launch, seat, 0).items() if name != "DTRAIN_HOST"}
        own |= {"DTRAIN_PRESENCE": 1, "OMP_NUM_THREADS": 1}
        program = [sys.executable, "-P", "-m", "trainer", "--config", f"{self.rundir.uri}/job.json"]
        return ["/usr/bin/env", *(f"{name}={value}" for name, value in own.items()), *program]
