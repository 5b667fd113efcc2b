"""Measure what a checkpoint every 100 steps costs a training on this machine, beside a synchronous torch.save.

Run `python -m benchmarks.checkpoint`. A transformer is trained with AdamW (weights and their two moments: 10 MB, 150 MB
and 1 GB), in intervals of a few steps. In each round three intervals follow each other in random order: one without a
save, one that begins with `CheckpointManager.save`, one that begins with `torch.save` (a file overwritten each time,
not hashed, not synced to the disk). An interval is long enough for the background writer to finish in it. The stall of
a save is therefore the time by which its interval is longer than the one of the same round without a save: the copy,
and the CPU time and memory bandwidth that the writer takes. Before each round the benchmark waits until the machine is
quiet; rounds in which other processes took more than a few percent of it are discarded and repeated. Figures are means
over rounds with the outermost tenth cut off at both ends, and their standard errors.

    stall_percent_*        percent of training time that one asynchronous save every 100 steps costs; sync_…: torch.save
    stall_seconds_*        by which one save lengthens training
    stall_error_percent_*  standard error of stall_percent
    call_seconds_*         part of the stall: time inside `save` (copying the state)
    writer_cpu_seconds_*   CPU time of the writer's thread for each save: an upper limit for the rest of the stall
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.manager import CheckpointManager
from trainer.rundir import RunDir

RESULTS = Path(__file__).parent / "results"
"""Folder of the saved results of all benchmarks."""
EVERY = 100
"""Steps between two checkpoints; the cost of a save is a percentage of their time."""
HERTZ = os.sysconf("SC_CLK_TCK")
DAYS, FEATURES = 64, 32
SIZES = {10: (136, 4), 150: (512, 4), 1000: (1000, 7)}
"""Megabytes of state → width and layers of the model."""


class Training:
    """A transformer that is trained on random windows of prices."""

    def __init__(self, width: int, layers: int, batch: int) -> None:
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)
        self.model = nn.Sequential(
            nn.Linear(FEATURES, width),
            nn.TransformerEncoder(block, layers, enable_nested_tensor=False),
            nn.Linear(width, 1),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.batches = [torch.randn(batch, DAYS, FEATURES) for _ in range(4)]
        self.steps = 0

    def step(self) -> None:
        """Do one optimizer step."""
        batch = self.batches[self.steps % len(self.batches)]
        self.optimizer.zero_grad()
        (self.model(batch)[..., 0] - batch.mean(-1)).square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.steps += 1

    def state(self) -> dict[str, Any]:
        """Return the state of model and optimizer, as a checkpoint saves it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Trial:
    """Intervals of a training with and without saves."""

    def __init__(self, training: Training, folder: str) -> None:
        self.training, self.file = training, f"{folder}/sync.pt"
        self.failures: list[str] = []
        self.written: list[float] = []
        self.calls: list[float] = []
        self.unfinished = 0
        self.manager = CheckpointManager(RunDir(folder), keep=2, fingerprint="benchmark", report=self._report)

    def _report(self, kind: str, **fields: Any) -> None:
        if kind == "checkpoint":
            self.written.append(fields["seconds"])
        else:
            self.failures.append(fields["message"])

    def time_steps(self, mode: str, steps: int) -> float:
        """Return the seconds of this many steps, after a save of this kind."""
        began = time.perf_counter()
        if mode == "async":
            assert self.manager.save(self.training.state(), self.training.steps, 1)
            self.calls.append(time.perf_counter() - began)
        elif mode == "sync":
            torch.save(self.training.state(), self.file)
        for _ in range(steps):
            self.training.step()
        seconds = time.perf_counter() - began
        if not self.manager.wait(0):
            self.unfinished += 1
            self.manager.wait()
        return seconds

    def writer_cpu_seconds(self) -> float:
        """Return the CPU seconds of the writer's thread so far; 0 if the system does not count them."""
        [thread] = [thread for thread in threading.enumerate() if thread.name == "checkpoints"]
        file = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        return int(file.read_text().split()[0]) / 1e9 if file.exists() else 0.0


class Others:
    """The CPU time that other processes take on this machine between two looks."""

    def __init__(self) -> None:
        self.look()

    def look(self) -> float:
        """Return the share of all cores that other processes took since the last look; 0 if the system does not count
        it."""
        try:
            fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        except OSError:
            return 0.0
        idle = fields[3] + fields[4]
        now = sum(fields) / HERTZ, (sum(fields) - idle) / HERTZ - time.process_time()
        before = getattr(self, "_before", now)
        self._before = now
        return max(0.0, now[1] - before[1]) / (now[0] - before[0]) if now[0] > before[0] else 0.0

    def wait_until_quiet(self, share: float, deadline: float) -> None:
        """Wait until other processes take no more than ``share``; raise RuntimeError if they still do at the
        deadline."""
        self.look()
        while True:
            time.sleep(1)
            if self.look() <= share:
                return
            if time.monotonic() > deadline:
                raise RuntimeError("other processes kept the machine busy: nothing can be measured")


def measure(
    megabytes: int, rounds: int, batch: int, folder: str, share: float, patience_seconds: float
) -> dict[str, Any]:
    """Return all figures of one size of state, under names without the size."""
    others, deadline, discarded = Others(), time.monotonic() + patience_seconds, 0
    others.wait_until_quiet(share, deadline)
    training = Training(*SIZES[megabytes], batch)
    trial = Trial(training, folder)
    for mode in ("off", "async", "sync", "async"):  # allocates the moments and the buffers, and warms the caches
        trial.time_steps(mode, 2)
    warm_up = trial.time_steps("off", 3) / 3
    steps = max(3, math.ceil(2.5 * max(trial.written) / warm_up) + 1)
    cpu, trial.calls, trial.unfinished = trial.writer_cpu_seconds(), [], 0
    seconds: dict[str, list[float]] = {"off": [], "async": [], "sync": []}
    order = random.Random(0)
    while len(seconds["off"]) < rounds:
        others.wait_until_quiet(share, deadline)
        trial.training.step()  # warms the caches, as each interval does for the next one
        found = {mode: trial.time_steps(mode, steps) for mode in order.sample(sorted(seconds), 3)}
        if others.look() > share:
            discarded += 1
            continue
        for mode, value in found.items():
            seconds[mode].append(value)
    cpu = trial.writer_cpu_seconds() - cpu
    trial.manager.close()
    if trial.failures:
        raise RuntimeError(f"saves failed, so nothing was measured: {trial.failures[0]}")
    step = trimmed([value / steps for value in seconds["off"]])[0]
    result: dict[str, Any] = {
        "state_bytes": sum(file.stat().st_size for file in Path(folder).glob("sync.pt")),
        "step_seconds": step,
        "steps_per_interval": steps,
        "rounds": rounds,
        "rounds_discarded": discarded,
        "unfinished": trial.unfinished,
        "call_seconds": statistics.fmean(trial.calls),
        "writer_cpu_seconds": cpu / (rounds + discarded),
        "write_seconds": statistics.fmean(trial.written),
    }
    for mode, prefix in (("async", ""), ("sync", "sync_")):
        differences = [value - off for value, off in zip(seconds[mode], seconds["off"], strict=True)]
        stall, error = trimmed(differences)
        result[f"{prefix}stall_percent"] = 100 * stall / (EVERY * step)
        result[f"{prefix}stall_error_percent"] = 100 * error / (EVERY * step)
        result[f"{prefix}stall_seconds"] = stall
    return result


def trimmed(values: list[float]) -> tuple[float, float]:
    """Return the mean without the outermost tenth at both ends, and its standard error (by winsorised variance)."""
    values, cut = sorted(values), len(values) // 10
    kept = values[cut : len(values) - cut]
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = statistics.stdev(winsorised) / ((1 - 2 * cut / len(values)) * math.sqrt(len(values)))
    return statistics.fmean(kept), error


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark with these command-line arguments, and print its line of JSON."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=list(SIZES), help="megabytes of state")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of three intervals, for each size (20)")
    parser.add_argument("--others", type=float, default=5.0, help="percent of CPU that others may take (5)")
    parser.add_argument(
        "--patience", type=float, default=3600.0, help="seconds to wait for a quiet machine, for each size (3600)"
    )
    parser.add_argument("--batch", type=int, default=8, help=f"samples (of {DAYS} days) in a step (8)")
    parser.add_argument("--folder", help="folder of the checkpoints (a temporary one)")
    parser.add_argument(
        "--out",
        nargs="?",
        const="checkpoint.json",
        help="also write the line to benchmarks/results/OUT (checkpoint.json)",
    )
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more: there is no error of one")
    result: dict[str, Any] = {
        "benchmark": "checkpoint",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "batch": options.batch,
    }
    for megabytes in options.sizes:
        name = f"{megabytes}mb" if megabytes < 1000 else f"{megabytes // 1000}gb"
        try:
            with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoint-") as folder:
                figures = measure(
                    megabytes, options.rounds, options.batch, folder, options.others / 100, options.patience
                )
        except RuntimeError as error:  # the figures of the other sizes stay valid
            figures = {"not_measured": str(error)}
        for key, value in figures.items():
            result[f"{key}_{name}"] = round(value, 4) if isinstance(value, float) else value
    line = json.dumps(result)
    print(line)
    if options.out:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / options.out).write_text(line + "\n")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
