"""Measure what timing and monitoring cost a training: the segments of every step, ``timing`` and ``node`` events.

Run `python -m benchmarks.overhead`. Two ranks on this machine train the stock model. In each round three intervals of
steps follow each other in random order, in the same processes, so that other work on the machine disturbs them alike:
with timing and the node's monitor, with the monitor alone, and with neither. Between intervals the ranks wait until all
events are written, so that each interval pays for its own. Figures are means over rounds with the outermost tenth cut
off at both ends, and their standard errors.

    overhead_percent       by which the wall-clock time of an interval is longer with timing and monitor
    sampling_percent       by which it is longer with the monitor alone
    cpu_…_percent          by which the CPU time of all ranks is more; other work disturbs it less than the clock
    code_percent           CPU time in the added code itself, counted in three more intervals, as a percentage of the
                           CPU time of an interval without it: hardly disturbed by other work; it includes the sum of
                           losses, which is needed anyway
    same_losses            whether two short trainings, with and without timing, have equal losses and weights, bit for
                           bit

All settings are the defaults. Each world exchanges its first windows at every report, which costs more: these are
warm-up here, so the figures hold for the rest of a long training.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "trainer"))

import worlds  # noqa: E402

from benchmarks.checkpoint import RESULTS, _cpu, trimmed  # noqa: E402
from trainer.config import parse_job  # noqa: E402
from trainer.data.loader import Batch  # noqa: E402
from trainer.engine.trainer import DistributedTrainer  # noqa: E402
from trainer.observability.comm_profiler import EAGER_WINDOWS, CommunicationProfiler  # noqa: E402
from trainer.observability.node_monitor import NodeMonitor  # noqa: E402
from trainer.observability.reporter import Reporter  # noqa: E402
from trainer.runtime.step_timer import StepTimer  # noqa: E402

RANKS, WARM_UP, FLUSH_SECONDS = 2, 10 * (EAGER_WINDOWS + 2), 1.5
DAYS, TICKERS, WINDOW = 3000, 20, 60
ADDED = (
    (StepTimer, "mark"), (CommunicationProfiler, "add"), (CommunicationProfiler, "exchange"),
    (CommunicationProfiler, "report"), (NodeMonitor, "sample"), (NodeMonitor, "update"), (Reporter, "emit"),
)  # fmt: skip
"""Methods that timing and monitoring add to a training."""
SETTINGS = {
    "world_size": RANKS, "batch_size_per_gpu": 128, "gradient_accumulation_steps": 2, "epochs": 1000,
    "log_frequency": 10, "checkpoint_frequency": 10**9, "eval_frequency": 10**9,
    "schedule": "constant",
}  # fmt: skip


class Trial(DistributedTrainer):
    """A training in intervals: ``modes`` says which of them are timed and monitored ("on"), monitored only ("sampled"),
    neither ("off"), or both with the CPU time of the added code counted ("count")."""

    def plan(self, modes: list[str], steps: int) -> None:
        """Set the modes of the intervals after warm-up, and the steps in each."""
        self.modes, self.interval_steps = ["on", *modes], steps
        self.found: list[dict[str, Any]] = []
        self._ends_at, self._before = WARM_UP, (0.0, 0.0)
        self._counted, self._clock_cost = 0.0, clock_cost()
        self._patches: list[Any] = []

    def train_epoch(self, dataloader: Iterable[Batch], epoch: int = 0) -> dict[str, float]:
        """Train an epoch, and change the mode where an interval ends."""
        return super().train_epoch(self._in_intervals(dataloader), epoch)

    def _in_intervals(self, dataloader: Iterable[Batch]) -> Iterator[Batch]:
        for batch in dataloader:
            if self.steps_done == self._ends_at and self.modes:
                self._turn()
            yield batch

    def _turn(self) -> None:
        clock, cpu = time.monotonic(), time.process_time()
        self.found.append({
            "mode": self.modes.pop(0), "seconds": clock - self._before[0], "cpu_seconds": cpu - self._before[1],
            "counted_seconds": self._counted,
        })  # fmt: skip
        for patch in self._patches:
            patch.stop()
        mode = self.modes[0] if self.modes else "on"
        self._watch(timed=mode in ("on", "count"), sampled=mode != "off")
        time.sleep(FLUSH_SECONDS)
        self.session.world.barrier()
        self._patches = [mock.patch.object(*place, self._counting(*place)) for place in ADDED if mode == "count"]
        for patch in self._patches:
            patch.start()
        self._counted, self._ends_at = 0.0, self._ends_at + self.interval_steps
        self.session.step.timer.drop()
        self._before = time.monotonic(), time.process_time()

    def _watch(self, timed: bool, sampled: bool) -> None:
        self.config.timing = self.session.step.timer.enabled = timed
        reports = self.reports
        if reports.monitor is not None:
            reports.monitor.stop()
        assert reports.reporter is not None
        reports.monitor = None
        if sampled:
            seconds = self.config.monitor_interval_seconds
            reports.monitor = NodeMonitor(self.session.facts.node_rank, reports.reporter, seconds, [os.getpid()])
            reports.monitor.start()

    def _counting(self, place: type, name: str) -> Any:
        real = getattr(place, name)

        @functools.wraps(real)
        def wrapped(*arguments: Any, **more: Any) -> Any:
            began = time.thread_time()
            result = real(*arguments, **more)
            self._counted += time.thread_time() - began - self._clock_cost
            return result

        return wrapped


def clock_cost() -> float:
    """Return the seconds that reading the clock adds to a measurement."""
    began = time.thread_time()
    for _ in range(9999):
        time.thread_time()
    return (time.thread_time() - began) / 10000


def be_a_rank(config: str, modes: list[str], steps: int) -> None:
    """Run one rank of the training; it writes its figures beside the configuration."""
    job = parse_job(Path(config).read_text())
    trainer = Trial(job)
    trainer.plan(modes, steps)
    trainer.initialize_distributed()
    trainer.setup()
    trainer.train()
    (Path(config).parent / f"found-{trainer.session.world.rank}.json").write_text(json.dumps(trainer.found))
    trainer.close()


def measure(folder: Path, dataset: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Return overhead and sampling, in percent with errors, from one training of ``rounds`` rounds."""
    order = random.Random(0)
    modes = [mode for _ in range(rounds) for mode in order.sample(("on", "sampled", "off"), 3)] + ["count"] * 3
    job = new_job(folder / "run", dataset, max_steps=WARM_UP + len(modes) * steps + 1)
    program = f"from benchmarks.overhead import be_a_rank; import sys; be_a_rank(sys.argv[2], {modes!r}, {steps})"
    codes = job.start(RANKS, program=("-c", program)).wait(36000)
    if codes != [0] * RANKS:
        raise RuntimeError(f"the training ended with {codes}: {job.result().get('error')}")
    ranks = [json.loads((job.run_dir / f"found-{rank}.json").read_text())[1:] for rank in range(RANKS)]
    wall = [max(found["seconds"] for found in interval) for interval in zip(*ranks, strict=True)]
    cpu = [sum(found["cpu_seconds"] for found in interval) for interval in zip(*ranks, strict=True)]
    counted = sum(found["counted_seconds"] for rank in ranks for found in rank) / 3
    plain = trimmed([cpu[at] for at in indices(modes, "off")])[0]
    result: dict[str, Any] = {"step_seconds": trimmed([wall[at] / steps for at in indices(modes, "off")])[0]}
    for kind, values in (("", wall), ("cpu_", cpu)):
        for name, mode in (("overhead", "on"), ("sampling", "sampled")):
            pairs = zip(indices(modes, mode), indices(modes, "off"), strict=True)
            ratios = [100 * (values[with_it] / values[without] - 1) for with_it, without in pairs]
            result[f"{kind}{name}_percent"], result[f"{kind}{name}_error_percent"] = trimmed(ratios)
    return {**result, "code_percent": 100 * counted / plain}


def indices(modes: list[str], mode: str) -> list[int]:
    """Return the positions of a mode among all intervals."""
    return [number for number, value in enumerate(modes) if value == mode]


def same_losses(folder: Path, dataset: Path) -> bool:
    """Return whether trainings with and without timing have equal losses and weights."""
    jobs = [new_job(folder / str(timing), dataset, max_steps=30, timing=timing) for timing in (True, False)]
    for job in jobs:
        if (codes := job.run(RANKS)) != [0] * RANKS:
            raise RuntimeError(f"a training ended with {codes}: {job.result().get('error')}")
    [one, other] = [(job.losses(), job.result()["weights_sha256"]) for job in jobs]
    return one == other


def new_job(folder: Path, dataset: Path, **training: Any) -> worlds.Job:
    """Return a job of the stock model on this dataset, with its own settings beside `SETTINGS`."""
    # One rank on each node, so that each rank has a monitor.
    environment = {"DTRAIN_CACHE": str(dataset.parent / "cache"), "LOCAL_WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)}
    return worlds.Job(folder, dataset, training={**SETTINGS, **training}, environment=environment)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark with these command-line arguments, and print its line of JSON."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=24, help="rounds of three intervals (24)")
    parser.add_argument("--steps", type=int, default=400, help="steps in an interval, a multiple of 10 (400)")
    parser.add_argument("--folder", help="folder of the trainings (a temporary one)")
    parser.add_argument(
        "--out", nargs="?", const="overhead.json", help="also write the line to benchmarks/results/OUT (overhead.json)"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 2 or options.steps % 10:
        parser.error("--rounds must be 2 or more, and --steps a multiple of 10")
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="overhead-") as name:
        folder = Path(name)
        with mock.patch.multiple(worlds, DAYS=DAYS, TICKERS=TICKERS):
            dataset = worlds.build(folder, window=WINDOW)
        figures = measure(folder, dataset, options.rounds, options.steps)
        figures["same_losses"] = same_losses(folder, dataset)
    result = {
        "benchmark": "overhead",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "ranks": RANKS,
        "rounds": options.rounds,
        "steps_per_interval": options.steps,
        "steps_per_report": SETTINGS["log_frequency"],
        **{key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()},
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }
    line = json.dumps(result)
    print(line)
    if options.out:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / options.out).write_text(line + "\n")


if __name__ == "__main__":
    main()
