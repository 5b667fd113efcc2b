"""Nodes that come and go: processes of the trainer, each with the environment that a cluster gives it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from worlds import FORKS, OWN_PARTS, Job, be_rank

from trainer.data.coverage import find_coverage_errors
from trainer.elastic.generation import Generation
from trainer.elastic.generation_record import generations

PATIENCE = 100.0
"""Seconds after which a test fails that waits for something."""
QUICK = {"health_check_seconds": 0.3, "peer_timeout_seconds": 20}
KILLED = -signal.SIGKILL


class Nodes:
    """The processes of one job, one on each node."""

    def __init__(self, job: Job, **environment: str) -> None:
        self.job, self.environment = job, {**job.environment, **environment}
        self.processes: dict[int, BaseProcess] = {}
        self._path = job.write()

    def start(self, *nodes: int, world: int = 3, launch: int = 1, stay: int = 1, faults: tuple[Any, ...] = ()) -> Nodes:
        """Start these nodes of a planned world; all of them, if none is named."""
        for node in nodes or range(world):
            environment = {
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parent),
                **OWN_PARTS,
                **self.environment,
                "RANK": str(node),
                "LOCAL_RANK": "0",
                "NODE_RANK": str(node),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "1",  # of no use: members find each other through the run directory
                "DTRAIN_LAUNCH": str(launch),
                "DTRAIN_INCARNATION": str(stay),
                "DTRAIN_FAULTS": json.dumps(faults),
            }
            log = self.job.run_dir / f"log-{node}.txt"
            given = ["--config", str(self._path)]
            self.processes[node] = FORKS.Process(target=be_rank, args=(given, environment, str(log)))
            self.processes[node].start()
        return self

    def signal(self, number: int, *nodes: int) -> None:
        for node in nodes:
            pid = self.processes[node].pid
            assert pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self, *nodes: int) -> list[int | None]:
        """Exit codes of these nodes; of all, if none is named."""
        chosen = nodes or sorted(self.processes)
        until = time.monotonic() + PATIENCE
        for node in chosen:
            self.processes[node].join(max(0.0, until - time.monotonic()))
        return [self.processes[node].exitcode for node in chosen]

    def until(self, true: Callable[[], bool]) -> None:
        """Wait for something; fail at once when nobody is left who could bring it about."""
        until = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < until, self.log()
            assert any(process.is_alive() for process in self.processes.values()), self.log()
            time.sleep(0.03)

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

    def kill(self) -> None:
        for process in self.processes.values():
            if process.pid is not None:
                process.kill()
                process.join()


def weights(job: Job) -> dict[str, torch.Tensor]:
    return torch.load(job.run_dir / "model" / "weights.pt", weights_only=True)


def assert_undisturbed(nodes: Nodes, whole: Job) -> None:
    """The training ended as one that nothing disturbed: the same weights within 1e-5, and each sample used once."""
    result = nodes.job.result()
    assert result.get("status") == "succeeded", nodes.log()
    mine, theirs = weights(nodes.job), weights(whole)
    largest = max(float(tensor.abs().max()) for tensor in theirs.values())
    for name, tensor in theirs.items():
        assert float((mine[name] - tensor).abs().max()) <= 1e-5 * largest, name
    assert result["consumed"] == whole.result()["consumed"]
    epochs = round(result["epochs"])
    assert find_coverage_errors(result["consumed"], result["train_samples"], epochs) == []
    assert len(result["consumed"]) == epochs > 0
    numbers = [generation.number for generation in nodes.history()]
    assert numbers == sorted(set(numbers))
    for manifest in (nodes.job.run_dir / "checkpoints").glob("g*/manifest.json"):
        assert json.loads(manifest.read_text())["generation"] in numbers
