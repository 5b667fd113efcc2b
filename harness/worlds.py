"""A small dataset, built by the product itself, and worlds of real processes that train on it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.validation import validate_prices
from harness.own_models import OWN_MODELS
from harness.waiting import until
from trainer.__main__ import main, run
from trainer.comm.launcher_env import RankFacts, rank_variables
from trainer.data.coverage import find_coverage_errors
from trainer.rundir import RunDir

if TYPE_CHECKING:
    import torch

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
FORKS.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "torch.profiler", "scipy.special", "tenacity", "trainer.__main__"),
        *(f"trainer.engine.{name}" for name in ("trainer", "run_job", "window_problem", "finalize")),
        *("trainer.model.stock", "trainer.model.rows"),
        "trainer.elastic.dynamic_rendezvous",
        *(f"trainer.observability.{name}" for name in ("link_probe", "node_presence", "trace")),
        "trainer.performance.memory",
    ]
)
"""Ranks are forked from a process that has loaded all that they load: that costs more than a short training."""


def be_rank(
    arguments: Sequence[str], environment: Mapping[str, str], log: str, prepare: Callable[[], None] | None = None
) -> None:
    """The life of a forked process that ``python -m trainer`` with these arguments would have been."""
    os.setpgid(0, 0)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if prepare:
        prepare()
    sys.exit(run(arguments))


class Forked:
    """A Python program in a forked process, with the names of `subprocess.Popen`: it need not load torch first. What it
    prints is in ``stdout``, with ``errors`` also what it says of them."""

    def __init__(
        self, program: str, *arguments: str, environment: Mapping[str, str] | None = None, errors: bool = False
    ) -> None:
        given, write = FORKS.Pipe(duplex=False)
        read, printed = FORKS.Pipe(duplex=False)
        what = program, arguments, dict(os.environ if environment is None else environment), errors
        self.process = FORKS.Process(target=_be_program, args=(write, given, printed, *what))
        self.process.start()
        given.close()
        printed.close()
        self.pid = self.process.pid or 0
        self.stdin, self.stdout = os.fdopen(os.dup(write.fileno()), "w"), os.fdopen(os.dup(read.fileno()))
        write.close()
        read.close()

    def say(self, line: str) -> None:
        print(line, file=self.stdin, flush=True)

    def communicate(self, said: str = "", timeout: float = 60.0) -> str:
        """Write this, close the input, and return what was printed until the end, which comes within the timeout."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.write(said)
            self.stdin.close()
        printed = self.stdout.read()
        self.wait(timeout)
        return printed

    def wait(self, timeout: float = 60.0) -> int:
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"it still runs after {timeout:g} s"
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _be_program(
    write: Connection, given: Connection, printed: Connection, program: str, arguments: Sequence[str],
    environment: Mapping[str, str], errors: bool,
) -> None:  # fmt: skip
    """The life of a forked process that ``python -c`` with this program would have been."""
    write.close()  # else it would wait for itself at the end of its input
    os.setpgid(0, 0)
    os.dup2(given.fileno(), 0)
    os.dup2(printed.fileno(), 1)
    if errors:
        os.dup2(1, 2)
    given.close()
    printed.close()
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})


@contextlib.contextmanager
def frozen(program: str, *arguments: str) -> Iterator[Callable[[], str]]:
    """A program that freezes itself, once it has; the function lets it go on, and returns what it has printed."""
    with Forked(program, *arguments) as process:

        def thaw() -> str:
            os.kill(process.pid, signal.SIGCONT)
            return process.communicate()

        until(lambda: "T (stopped)" in Path(f"/proc/{process.pid}/status").read_text())
        yield thaw


def launched(rank: int, world: int, each: int = 0, port: int = 1) -> dict[str, str]:
    """What a launcher tells a rank. ``each``: ranks on a node; all are on one, where it is left out. ``port``: of no
    use to members of a cluster, which find each other through the run directory."""
    each = each or world
    facts = RankFacts(
        rank=rank, world_size=world, local_rank=rank % each, local_world_size=each, node_rank=rank // each,
        master_addr="127.0.0.1", master_port=port,
    )  # fmt: skip
    found = rank_variables(facts)
    return found if each < world else {name: value for name, value in found.items() if name != "NODE_RANK"}


class Run:
    """A training's processes, by rank, and what they leave behind."""

    run_dir: Path
    processes: dict[int, BaseProcess]

    def fork(self, rank: int, life: Callable[..., None], *given: Any) -> None:
        self.processes[rank] = FORKS.Process(target=life, args=given)
        self.processes[rank].start()

    def wait_for(self, seconds: float, *ranks: int) -> list[int | None]:
        """Exit codes of these, or of all; None for those that still run after all this time."""
        end, chosen = time.monotonic() + seconds, ranks or sorted(self.processes)
        for rank in chosen:
            self.processes[rank].join(max(0.0, end - time.monotonic()))
        return [self.processes[rank].exitcode for rank in chosen]

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid or 0, number)

    def kill(self) -> None:
        for process in self.processes.values():
            if process.pid is not None:
                process.kill()
                process.join()

    def result(self) -> dict[str, Any]:
        path = self.run_dir / "result.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def weights(self) -> dict[str, torch.Tensor]:
        import torch

        return torch.load(self.run_dir / "model" / "weights.pt", weights_only=True)


def assert_same_training(one: Run, whole: Run) -> None:
    """It ended well, with the weights of the other one within 1e-5, and used each sample once in each epoch."""
    result, mine, theirs = one.result(), one.weights(), whole.weights()
    assert result["status"] == "succeeded", result
    assert list(mine) == list(theirs)
    largest = max(float(tensor.abs().max()) for tensor in theirs.values())
    for name, tensor in theirs.items():
        assert float((mine[name] - tensor).abs().max()) <= 1e-5 * largest, name
    assert result["consumed"] == whole.result()["consumed"]
    epochs = round(result["epochs"])
    assert find_coverage_errors(result["consumed"], result["train_samples"], epochs) == []
    assert len(result["consumed"]) == epochs > 0


@dataclass
class Job(Run):
    """A job and the worlds that worked on it."""

    run_dir: Path
    dataset: Path
    sections: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    processes: dict[int, BaseProcess] = field(default_factory=dict)

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

    def start(self, world: int = 1, *arguments: str, prepare: Callable[[], None] | None = None) -> Job:
        """Start the ranks of a world and return at once. ``prepare``: what each does before it trains."""
        path, port = self.write(), free_port()
        for rank in range(world):
            given = {"PYTHONPATH": str(OWN_MODELS), **launched(rank, world, port=port), **OWN_PARTS}
            environment = {**os.environ, **given, **self.environment}
            command = ["--config", str(path), *arguments]
            self.fork(rank, be_rank, command, environment, str(self.run_dir / f"log-{rank}.txt"), prepare)
        return self

    def wait(self, seconds: float = 120) -> list[int | None]:
        """Exit codes of the world that was started last."""
        codes = self.wait_for(seconds)
        self.kill()
        self.processes.clear()
        return codes

    def run(self, world: int = 1, *arguments: str, prepare: Callable[[], None] | None = None) -> list[int | None]:
        return self.start(world, *arguments, prepare=prepare).wait()

    def run_here(self, *arguments: str) -> int:
        """Train in this process, as a world of one; the exit code."""
        path = [str(OWN_MODELS), *sys.path]
        with mock.patch.dict(os.environ, OWN_PARTS | self.environment), mock.patch.object(sys, "path", path):
            return main(["--config", str(self.write()), *arguments])

    def signal_when(self, true: Callable[[], bool], *ranks: int, number: int = signal.SIGTERM) -> None:
        """Send a signal to these ranks as soon as something is so."""
        until(true, self.log, 100, lambda: all(process.is_alive() for process in self.processes.values()))
        self.signal(number, *ranks)

    def log(self, rank: int = 0) -> str:
        return (self.run_dir / f"log-{rank}.txt").read_text()

    def losses(self) -> dict[int, float]:
        """Step -> loss; a step done twice keeps the later one."""
        return {item["step"]: item["loss"] for item in self.rundir.events("step")}

    def events(self, kind: str) -> list[dict[str, Any]]:
        return list(self.rundir.events(kind))

    def result(self) -> dict[str, Any]:
        return self.rundir.read_json("result.json") or {}


def run_torchrun(job: Job, program: Sequence[str], *more: str, **environment: str) -> tuple[int, str]:
    """Two ranks of a program that takes ``--config``, under torchrun: its exit code, and what all of them said."""
    clean = {name: value for name, value in os.environ.items() if "RANK" not in name and "WORLD" not in name}
    master = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    arguments = ["--nproc-per-node", "2", *master, *program, "--config", str(job.write()), *more]
    given = {**clean, **job.environment, **environment}
    with Forked("from torch.distributed.run import main; main()", *arguments, environment=given, errors=True) as run:
        said = run.communicate(timeout=200)
        return run.wait(), said
