"""A small training through the manager of an engine's cluster, the same for all engines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from dtrain_dagster.clusters.base import GPUClusterManager, JobSpec, JobState, JobStatus
from dtrain_dagster.clusters.managers import LocalClusterManager
from harness.engines.machines import OWN_MODELS
from harness.small_job import write_dataset
from trainer.config import DatasetRef, DistributedTrainingConfig, FactoryConfig, JobConfig, TrackingConfig
from trainer.rundir import RunDir

NODES = 2
STEPS = 300
PACED = FactoryConfig(factory="paced:tcn", args={"pause_seconds": 0.04})
"""A model of a user's own that takes its time, however fast the machine is: enough for an engine to miss a machine, and
to start a node in its place."""
WAIT_SECONDS = 240.0


class Outcome(NamedTuple):
    status: str
    steps: int
    consumed: list[dict[str, Any]]
    """Of each epoch: the number of its samples, and a digest of which."""
    weights: dict[str, torch.Tensor]


def write_job(folder: Path, steps: int, nodes: int = NODES, model: FactoryConfig | None = None) -> RunDir:
    """A job and its dataset in a home."""
    dataset = write_dataset(folder / "dataset")
    rundir = RunDir(str(folder / "storage" / "jobs" / "one"))
    training = DistributedTrainingConfig(
        world_size=nodes, max_steps=steps, epochs=10_000, warmup_steps=5, threads_per_rank=1, batch_size_per_gpu=64,
        checkpoint_frequency=1000, keep_checkpoints=1, eval_frequency=steps,
        learning_rate=2e-5,  # where rounding of sums is not blown up over many steps, as it is by chaos
    )  # fmt: skip
    rundir.write_job(JobConfig(
        job_id="one", run_dir=rundir.uri, dataset=DatasetRef(uri=str(dataset)), training=training,
        tracking=TrackingConfig(tensorboard=False), **({"model": model} if model else {}),
    ))  # fmt: skip
    return rundir


class Training:
    """One job of a manager, from its submission to its outcome."""

    def __init__(
        self,
        manager: GPUClusterManager,
        rundir: RunDir,
        nodes: int = NODES,
        place: Sequence[str] = (),
    ) -> None:
        """``place``: words before the command, as of `Hosts.local_cluster`."""
        self.env = {name: os.environ[name] for name in ("DTRAIN_FACTORY_MODULES",) if name in os.environ}
        self.manager, self.rundir, self.nodes, self.place = manager, rundir, nodes, place

    def submit(self, command: Sequence[str] = (), **fields: Any) -> None:
        """``command``: another than the training; ``fields``: of its `JobSpec`."""
        command = tuple(command) or (
            *self.place,
            self.manager.python,
            "-P",
            "-m",
            "trainer",
            "--config",
            f"{self.rundir.uri}/job.json",
        )
        self.manager.submit_job(
            JobSpec(
                job_id="one",
                run_dir=self.rundir.uri,
                command=command,
                node_count=self.nodes,
                elastic=True,
                env=self.env,
                **fields,
            )
        )

    def status(self) -> JobStatus:
        return self.manager.job_status("one")

    def launch(self) -> dict[str, Any]:
        return self.rundir.read_json("launch.json") or {}

    def step(self) -> int:
        """The last step that was told."""
        return max((event["step"] for event in self.rundir.events("step")), default=0)

    def run_until(self, holds: Callable[[], object], what: str) -> None:
        """Wait until this holds; the output of all goes into the error if it takes too long, or if the job ends."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not holds():
            assert time.monotonic() < deadline, f"waited in vain for {what}\n{self.said()}"
            assert not self.status().state.is_final, f"it ended before {what}\n{self.said()}"
            time.sleep(0.1)

    def end(self) -> JobState:
        """Wait for the end, and return the final state."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (status := self.status()).state.is_final:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)
        return status.state

    def outcome(self) -> Outcome:
        assert self.end() == JobState.SUCCEEDED, self.said()
        result = self.rundir.read_result()
        assert result is not None
        assert result["weights_equal_on_ranks"]
        weights = torch.load(f"{self.rundir.uri}/model/weights.pt", weights_only=True)
        return Outcome(result["status"], result["steps"], result["consumed"], weights)

    def said(self) -> str:
        return f"{self.rundir.read_json('status.json')}\n" + "\n".join(
            f"--- {path.name}\n{path.read_text()[-4000:]}" for path in Path(self.rundir.uri).glob("logs/*")
        )

    def processes(self, words: str = "") -> list[psutil.Process]:
        """What runs for this job on this machine, with these words in its command line."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            line = " ".join(process.info["cmdline"] or [])
            if process.info["status"] != psutil.STATUS_ZOMBIE and self.rundir.uri in line and words in line:
                found.append(process)
        return found

    def close(self) -> None:
        """End what is left."""
        if not self.status().state.is_final:
            self.manager.cancel_job("one")


@contextmanager
def own_models() -> Iterator[None]:
    """Let this process, and what it starts, find `PACED`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(OWN_MODELS)
        patch.setenv("PYTHONPATH", str(OWN_MODELS), prepend=os.pathsep)
        patch.setenv("DTRAIN_FACTORY_MODULES", "paced")
        yield


def train_here(home: Path, model: FactoryConfig = PACED) -> Outcome:
    """Train on the local cluster, with as many nodes."""
    with own_models():
        training = Training(LocalClusterManager(home), write_job(home, STEPS, model=model))
        training.submit()
        try:
            return training.outcome()
        finally:
            training.close()
