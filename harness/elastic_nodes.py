"""Nodes that come and go: processes of the trainer, each with the environment that a cluster gives it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from harness.own_models import OWN_MODELS
from harness.waiting import until
from harness.worlds import OWN_PARTS, Job, Run, assert_same_training, be_rank, launched
from trainer.elastic.generation import Generation
from trainer.elastic.generation_record import generations
from trainer.runtime.launch import Launch

if TYPE_CHECKING:
    import torch

PATIENCE = 100.0
"""Seconds after which a test fails that waits for something."""
QUICK = {"health_check_seconds": 0.3, "peer_timeout_seconds": 20}
KILLED = -signal.SIGKILL


class Nodes(Run):
    """The processes of one job, by rank; ``each``: so many on a node."""

    def __init__(self, job: Job, each: int = 1, **environment: str) -> None:
        self.job, self.each, self.environment = job, each, {**job.environment, **environment}
        self.run_dir, self.processes = job.run_dir, {}

    def start(self, *nodes: int, world: int = 3, launch: int = 1, stay: int = 1, faults: Sequence[Any] = ()) -> Nodes:
        """Start these nodes of a planned world of ``world`` nodes; all of them, if none is named."""
        given = ["--config", str(self.job.write())]
        for node in nodes or range(world):
            for rank in range(node * self.each, (node + 1) * self.each):
                environment = {
                    **os.environ,
                    "PYTHONPATH": str(OWN_MODELS),
                    **OWN_PARTS,
                    **self.environment,
                    **launched(rank, world * self.each, self.each),
                    "NODE_RANK": str(node),
                    **Launch(number=launch, incarnation=stay, is_elastic=True).variables(),
                    "DTRAIN_FAULTS": json.dumps(faults),
                }
                self.fork(rank, be_rank, given, environment, str(self.run_dir / f"log-{rank}.txt"))
        return self

    def wait(self, *ranks: int) -> list[int | None]:
        """Exit codes of these; of all, if none is named."""
        return self.wait_for(PATIENCE, *ranks)

    def until(self, true: Callable[[], bool]) -> None:
        """Wait for something; fail at once when nobody is left who could bring it about."""
        until(true, self.log, PATIENCE, lambda: any(process.is_alive() for process in self.processes.values()))

    def step(self) -> int:
        """Steps done and reported so far."""
        return max([item["step"] for item in self.job.rundir.events("step")], default=0)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step() >= step)

    def until_members(self, *nodes: int) -> None:
        """Wait until exactly these nodes are the newest generation."""
        self.until(lambda: sorted(nodes) == (self.members() or [[]])[-1])

    def history(self) -> list[Generation]:
        return generations(self.job.rundir.storage)

    def members(self) -> list[list[int]]:
        """The nodes of each generation."""
        return [sorted(item.node for item in generation.members) for generation in self.history()]

    def log(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.job.run_dir.glob("log-*.txt")))


def weights(job: Job) -> dict[str, torch.Tensor]:
    return job.weights()


def assert_undisturbed(nodes: Nodes, whole: Job) -> None:
    """The training ended as one that nothing disturbed, and no generation's number was used twice."""
    assert nodes.job.result().get("status") == "succeeded", nodes.log()
    assert_same_training(nodes.job, whole)
    numbers = [generation.number for generation in nodes.history()]
    assert numbers == sorted(set(numbers))
    for manifest in (nodes.job.run_dir / "checkpoints").glob("g*/manifest.json"):
        assert json.loads(manifest.read_text())["generation"] in numbers
