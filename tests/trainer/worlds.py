"""A small dataset, built by the product itself, and worlds of real processes that train on it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.validation import validate_prices
from trainer.__main__ import main, run
from trainer.rundir import RunDir

WINDOW, DAYS, TICKERS = 20, 700, 4


def build(folder: Path, seed: int = 0, window: int = WINDOW, shards: int = 2) -> Path:
    """Random walks with changing volatility, as a CSV file and then as a dataset; its folder."""
    random = np.random.default_rng(seed)
    days = np.busday_offset("2015-01-01", np.arange(DAYS), roll="forward")
    spread = 0.01 * np.exp(0.4 * np.sin(np.arange(DAYS)[:, None] / 40 + np.arange(TICKERS)))
    prices = 100 * np.exp(np.cumsum(random.standard_normal((DAYS, TICKERS)) * spread, axis=0))
    table = folder / "walks.csv"
    lines = [",".join([str(day), *(f"{price:.6f}" for price in row)]) for day, row in zip(days, prices, strict=True)]
    table.write_text("\n".join(["date," + ",".join(f"T{number}" for number in range(TICKERS)), *lines]) + "\n")
    ref = write_prices(price_source(str(table)), str(folder))
    checked = validate_prices(ref, calendar=None)
    params = DatasetParams(window=window, shards=shards)
    return Path(build_dataset(ref, checked, str(folder), params, calendar=None).uri)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


# Small steps, many of them; accumulation, clipping, and dropout (by default in the model) are on.
TRAINING = {
    "world_size": 3,
    "batch_size_per_gpu": 32,
    "gradient_accumulation_steps": 2,
    "warmup_steps": 3,
    "epochs": 3,
    "log_frequency": 1,
    "checkpoint_frequency": 5,
    "clip_norm": 0.5,
    "threads_per_rank": 1,
    "collective_timeout_seconds": 30,
    "monitor_interval_seconds": 0.5,
}

OWN_PARTS = {"DTRAIN_FACTORY_MODULES": "user_parts"}
"""The setting that lets tests train parts of their own."""

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch._dynamo", "trainer.engine.trainer", "trainer.__main__"])
"""Ranks are forked from a process that has torch loaded already: to import it costs more than a short training."""


def be_rank(arguments: Sequence[str], environment: Mapping[str, str], log: str) -> None:
    """The life of a forked process that ``python -m trainer`` with these arguments would have been."""
    os.setpgid(0, 0)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.exit(run(arguments))


class Forked:
    """A rank that was forked, as far as it is used like a `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._process = FORKS.Process(target=be_rank, args=(arguments, environment, str(log)))
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise TimeoutError(f"it did not end within {seconds} s")
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.pid and self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


@dataclass
class Job:
    """A job and the worlds that worked on it."""

    run_dir: Path
    dataset: Path
    sections: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    processes: list[Forked | subprocess.Popen[str]] = field(default_factory=list)

    @property
    def rundir(self) -> RunDir:
        return RunDir(str(self.run_dir))

    def write(self) -> Path:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        config = {
            "job_id": "test",
            "run_dir": str(self.run_dir),
            "dataset": {"uri": str(self.dataset)},
            "tracking": {"tensorboard": False},
            **self.sections,
            "training": {**TRAINING, **self.training},
        }
        path = self.run_dir / "job.json"
        path.write_text(json.dumps(config))
        return path

    def start(self, world: int = 1, *arguments: str, program: tuple[str, ...] = ()) -> Job:
        """Start the ranks of a world and return at once. ``program``: Python's arguments, for what is to be executed
        instead of the trainer."""
        path, port = self.write(), free_port()
        for rank in range(world):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **OWN_PARTS,
                **self.environment,
            }
            log, given = self.run_dir / f"log-{rank}.txt", ["--config", str(path), *arguments]
            if not program:
                self.processes.append(Forked(given, environment, log))
                continue
            with log.open("a") as output:
                command = [sys.executable, *program, *given]
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=output, text=True)
                )
        return self

    def wait(self, seconds: float = 120) -> list[int]:
        """Exit codes of the world that was started last."""
        try:
            return [process.wait(seconds) for process in self.processes]
        finally:
            self.kill()

    def run(self, world: int = 1, *arguments: str, program: tuple[str, ...] = ()) -> list[int]:
        return self.start(world, *arguments, program=program).wait()

    def run_here(self, *arguments: str) -> int:
        """Train in this process, as a world of one; the exit code."""
        with mock.patch.dict(os.environ, OWN_PARTS | self.environment):
            return main(["--config", str(self.write()), *arguments])

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes.clear()

    def signal_when(self, true: Callable[[], bool], *ranks: int, number: int = signal.SIGTERM) -> None:
        """Send a signal to these ranks as soon as something is so."""
        until = time.monotonic() + 100
        while not true():
            assert time.monotonic() < until, self.log()
            assert all(process.poll() is None for process in self.processes), self.log()
            time.sleep(0.05)
        for rank in ranks:
            self.processes[rank].send_signal(number)

    def log(self, rank: int = 0) -> str:
        return (self.run_dir / f"log-{rank}.txt").read_text()

    def losses(self) -> dict[int, float]:
        """Step -> loss; a step done twice keeps the later one."""
        return {item["step"]: item["loss"] for item in self.rundir.events("step")}

    def events(self, kind: str) -> list[dict[str, Any]]:
        return list(self.rundir.events(kind))

    def result(self) -> dict[str, Any]:
        return self.rundir.read_json("result.json") or {}
