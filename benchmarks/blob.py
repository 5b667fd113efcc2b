"""Measure how long saving a checkpoint to Azure Blob Storage takes, with blocks in parallel and one after the other.

Run `python -m benchmarks.blob`. A transformer is trained with AdamW: 150 MB of weights and moments. First, saves follow
each other while nothing else is done, alternately with several blocks in flight at once and with one. Then come rounds
of three intervals of training, in random order: one without a save, one that begins with `CheckpointManager.save` on a
run directory on Blob, and one that begins with the same save while only one block is in flight at a time. The save is
written in the background; an interval is meant to be long enough for it. The stall of the training is the time by which
this interval is longer than the one without a save: the copy, and the CPU time that the save takes from the training.

The account is Azurite on this machine, started for the measurement, unless ``--uri az://…`` gives another. Azurite
takes CPU time from the training, and answers without a network in between. Therefore the saves are also made through a
proxy that delays every request by `DELAY_SECONDS`. No figure says what a real account does. Figures are medians.

    save_seconds_*           from the start of the background write to a complete checkpoint, nothing else running
    delayed_save_seconds_*   the same, through the proxy (not with ``--uri``)
    busy_save_seconds_*      the same as the first, while the training runs (the writer has the lowest priority)
    stall_seconds_*          by which an interval of training with one save is longer
    stall_error_*            half the distance between the quartiles of the stalls
    call_seconds             part of the stall: time inside `save` (copying the state)
    load_seconds             reading the checkpoint back in parallel blocks, with its sha256 checked
    unfinished               intervals that were too short for their save
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint import RESULTS, SIZES, Training
from trainer.checkpoint.manager import CheckpointManager
from trainer.rundir import RunDir
from trainer.storage.azure_blob import PARALLEL, BlobStorage

MEGABYTES = 150
"""Size of the state: model and optimizer."""
DELAY_SECONDS = 0.05
"""Delay of each request by the proxy."""
MODES = {"parallel": PARALLEL, "serial": 1}
"""Kinds of save, and the number of blocks in flight at once of each."""


class Trial:
    """Intervals of one training, with saves to one folder."""

    def __init__(self, uri: str, batch: int) -> None:
        self.training = Training(*SIZES[MEGABYTES], batch)
        self.rundir = RunDir(uri)
        self.saved: dict[str, Any] = {}
        self.unfinished = 0
        self.calls: list[float] = []
        self.saves = 0
        self.manager = CheckpointManager(self.rundir, keep=1, fingerprint="benchmark", report=self._report)

    def _report(self, kind: str, **fields: Any) -> None:
        if kind != "checkpoint":
            raise RuntimeError(f"a save failed, so nothing was measured: {fields}")
        self.saved = fields

    def save(self, mode: str) -> None:
        """Begin a save of this kind."""
        storage = self.rundir.storage
        assert isinstance(storage, BlobStorage)
        storage.parallel = MODES[mode]
        self.saves += 1
        began = time.perf_counter()
        assert self.manager.save(self.training.state(), self.saves, 1)
        self.calls.append(time.perf_counter() - began)

    def idle(self, mode: str) -> float:
        """Return the seconds of a save while nothing else is done."""
        self.save(mode)
        self.manager.wait()
        return self.saved["seconds"]

    def time_steps(self, mode: str, steps: int) -> float:
        """Return the seconds of this many steps, after a save of this kind ("off": no save)."""
        began = time.perf_counter()
        if mode != "off":
            self.save(mode)
        for _ in range(steps):
            self.training.step()
        seconds = time.perf_counter() - began
        if not self.manager.wait(0):
            self.unfinished += 1
            self.manager.wait()
        return seconds


def alone(trial: Trial, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of saves of each kind, made alternately while nothing else is done."""
    for mode in MODES:  # allocates the buffers and opens the connections
        trial.idle(mode)
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode in MODES:
            found[mode].append(trial.idle(mode))
    return found


def delayed(upstream: str, uri: str, rounds: int, batch: int) -> dict[str, float]:
    """Return the medians of `alone` through a proxy that delays every request."""
    from tests.azure.blob_proxy import BlobProxy

    with BlobProxy(upstream) as proxy:
        before = dict(os.environ)
        os.environ.update(proxy.environment)
        try:
            trial = Trial(f"{uri}-delayed", batch)
        finally:
            os.environ.update(before)
        proxy.delay_seconds = DELAY_SECONDS
        trial.time_steps("off", 1)
        found = alone(trial, rounds)
        trial.manager.close()
    return {f"delayed_save_seconds_{mode}": statistics.median(values) for mode, values in found.items()}


def measure(uri: str, rounds: int, batch: int) -> dict[str, Any]:
    """Return the figures of all saves to ``uri``, alone and during a training, and delete the checkpoints."""
    trial = Trial(uri, batch)
    trial.time_steps("off", 1)  # allocates the moments
    idle = alone(trial, rounds)
    began = time.perf_counter()
    trial.manager.load(trial.saved["path"])
    load_seconds = time.perf_counter() - began
    trial.time_steps("parallel", 2)
    slowest = max(trial.saved["seconds"], *idle["serial"])
    steps = max(3, math.ceil(1.5 * slowest / (trial.time_steps("off", 3) / 3)))
    trial.calls.clear()
    seconds: dict[str, list[float]] = {"off": [], **{mode: [] for mode in MODES}}
    saves: dict[str, list[float]] = {mode: [] for mode in MODES}
    order = random.Random(0)
    for _ in range(rounds):
        for mode in order.sample(sorted(seconds), len(seconds)):
            seconds[mode].append(trial.time_steps(mode, steps))
            if mode in saves:
                saves[mode].append(trial.saved["seconds"])
    result: dict[str, Any] = {
        "state_bytes": trial.saved["bytes"],
        "rounds": rounds,
        "steps_per_interval": steps,
        "step_seconds": statistics.median(seconds["off"]) / steps,
        "blocks_at_once": PARALLEL,
        "call_seconds": statistics.median(trial.calls),
        "load_seconds": load_seconds,
        "unfinished": trial.unfinished,
    }
    for mode, values in saves.items():
        stalls = [value - off for value, off in zip(seconds[mode], seconds["off"], strict=True)]
        quartiles = statistics.quantiles(stalls, n=4)
        result[f"save_seconds_{mode}"] = statistics.median(idle[mode])
        result[f"busy_save_seconds_{mode}"] = statistics.median(values)
        result[f"stall_seconds_{mode}"] = statistics.median(stalls)
        result[f"stall_error_{mode}"] = (quartiles[2] - quartiles[0]) / 2
    result["serial_over_parallel"] = result["save_seconds_serial"] / result["save_seconds_parallel"]
    trial.manager.close()
    trial.rundir.storage.delete("")
    return result


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark with these command-line arguments, and print its line of JSON."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.blob", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of saves alone, and of three intervals (5)")
    parser.add_argument("--batch", type=int, default=2, help="samples (of 64 days) in a step (2)")
    parser.add_argument("--uri", help="a folder on a real account, az://container/path (Azurite on this machine)")
    parser.add_argument("--out", nargs="?", const="blob.json", help="also write the line to benchmarks/results/OUT")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more: there is no error of one")
    result: dict[str, Any] = {
        "benchmark": "blob",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "account": "Azure" if options.uri else "Azurite on this machine",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "batch": options.batch,
    }
    with contextlib.ExitStack() as stack:
        uri = options.uri
        if uri is None:
            from tests.azure.azurite import Azurite

            azurite = stack.enter_context(Azurite())
            azurite.create_container("benchmark")
            os.environ.update(azurite.environment)
            uri = "az://benchmark/run"
            result |= {"delay_seconds": DELAY_SECONDS, **delayed(azurite.url, uri, options.rounds, options.batch)}
        result |= measure(uri, options.rounds, options.batch)
    line = json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()})
    print(line)
    if options.out:
        Path(RESULTS).mkdir(exist_ok=True)
        (RESULTS / options.out).write_text(line + "\n")


if __name__ == "__main__":
    main()
