"""Measure the samples per second of `trainer.Trainer.fit` against the loop that torch's own tutorial of DDP has.

Run `python -m benchmarks.fit`. Both train the same model on the same dataset in the same processes, one after the other
in each round, in random order: gloo and one thread per rank on a CPU, with the same batch, workers, collate function,
loss and optimizer (fused AdamW, no clipping). The plain loop has DDP, DataLoader and DistributedSampler, keeps its
workers between epochs, and has malloc set as the trainer sets it. The trainer is as it is, with reports, monitor and
TensorBoard; neither evaluates nor saves checkpoints meanwhile. Time counts on rank 0 from the end of the first epoch to
the last batch, read where both call the same loss: pauses between epochs are in it, start and end are not.

    tensors      rows of tensors (64 numbers, 10 classes), no workers
    python       a dataset with work in Python for each sample, two workers per rank
    dictionary   samples that a collate function of one's own makes into a mapping, no workers

    min_vs_plain   the lowest median over rounds of samples per second of `fit` divided by that of the plain loop, over
                   all kinds and numbers of ranks; above 1 `fit` is faster
    cells          by kind and ranks: samples per second (medians), the ratio with its 95 % interval (bootstrap over
                   rounds), and the ratios of the rounds

The result is written to ``benchmarks/results/fit.json`` with --save, if the machine was quiet enough before, or with
--busy, which is noted. `--device cuda` uses one GPU per rank and nccl; it has not been run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from benchmarks.host import is_busy, note, tell
from benchmarks.throughput import interval
from trainer import DistributedConfig, Trainer
from trainer.runtime.host_memory import keep_freed_memory

KINDS = ("tensors", "python", "dictionary")
BATCH, CLASSES, WIDTH = 32, 10, 64
SAMPLES = {"tensors": 4096, "python": 2048, "dictionary": 4096}
EPOCHS = 5
"""Epochs of each training, of which the first is not counted."""


class Worked(Dataset[tuple[Tensor, int]]):
    """Samples that take work in Python, as the decoding of a line of text does."""

    def __init__(self, rows: Tensor, target: Tensor) -> None:
        self.lines = [",".join(f"{value:.4f}" for value in row) for row in rows.tolist()]
        self.target = target.tolist()

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        values = [float(part) for part in self.lines[position].split(",")]
        return torch.tensor(values), self.target[position]


class Named(Dataset[dict[str, Any]]):
    """Samples by name, with a text."""

    def __init__(self, rows: Tensor, target: Tensor) -> None:
        self.rows, self.target = rows, target

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {"values": self.rows[position], "class": self.target[position], "name": str(position)}


def collate_named(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a batch by name."""
    return {
        "values": torch.stack([sample["values"] for sample in samples]),
        "class": torch.stack([sample["class"] for sample in samples]),
        "name": [sample["name"] for sample in samples],
    }


class TimedTask:
    """The cross entropy, with the times at which it is asked for."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def loss(self, model: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """Return one loss per sample."""
        self.times.append(time.monotonic())
        values, target = (batch["values"], batch["class"]) if isinstance(batch, dict) else batch
        return nn.functional.cross_entropy(model(values), target, reduction="none")


def make_data(kind: str, workers: int) -> tuple[Dataset[Any], dict[str, Any]]:
    """Return a dataset, and the options of a loader for it."""
    chance = torch.Generator().manual_seed(0)
    rows = torch.rand(SAMPLES[kind], WIDTH, generator=chance)
    target = (rows.sum(1) * 10).long() % CLASSES
    if kind == "tensors":
        return TensorDataset(rows, target), {"batch_size": BATCH}
    if kind == "python":
        return Worked(rows, target), {"batch_size": BATCH, "num_workers": workers}
    return Named(rows, target), {"batch_size": BATCH, "collate_fn": collate_named}


def make_model() -> nn.Module:
    """Return the network, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def pace(times: Sequence[float], samples: int, ranks: int) -> float:
    """Return the samples per second of all ranks from the times of one rank's batches after its first epoch. Pure."""
    per_epoch = samples // (BATCH * ranks)
    counted = times[per_epoch:]
    return (len(counted) - 1) * BATCH * ranks / (counted[-1] - counted[0])


def train_with_fit(kind: str, workers: int, device: str, run_dir: Path) -> list[float]:
    """Train with the trainer; the times of this rank's batches."""
    data, options = make_data(kind, workers)
    task = TimedTask()
    config = DistributedConfig(
        epochs=EPOCHS, clip_norm=None, threads_per_rank=1, schedule="constant", warmup_steps=0, weight_decay=0.01,
        learning_rate=1e-3, checkpoint_frequency=1_000_000, backend="nccl" if device == "cuda" else "gloo",
    )  # fmt: skip
    Trainer(make_model(), config, task=task, run_dir=run_dir, progress=False).fit(DataLoader(data, **options))
    return task.times[1:]  # the first is of the trial before the training


def train_plainly(kind: str, workers: int, device: str) -> list[float]:
    """Train with the loop of torch's tutorial; the times of this rank's batches."""
    data, options = make_data(kind, workers)
    place = torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
    task, model = TimedTask(), DistributedDataParallel(make_model().to(place))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, sampler=sampler, persistent_workers="num_workers" in options and workers > 0, **options)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            moved = {name: _moved(part, place) for name, part in batch.items()} if isinstance(batch, dict) else [
                _moved(part, place) for part in batch
            ]  # fmt: skip
            optimizer.zero_grad()
            task.loss(model, moved).mean().backward()
            optimizer.step()
    return task.times


def _moved(part: Any, place: torch.device) -> Any:
    return part.to(place) if isinstance(part, Tensor) else part


def be_rank(kinds: Sequence[str], rounds: int, workers: int, device: str, folder: Path) -> None:
    """Train all kinds in all rounds with both, and let rank 0 write the samples per second."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    keep_freed_memory()
    order, found = random.Random(0), dict[str, dict[str, list[float]]]()
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=(folder / f"store-{ranks}").as_uri(), rank=rank,
        world_size=ranks,
    )  # fmt: skip
    for number in range(rounds):
        for kind in kinds:
            for name in order.sample(("fit", "plain"), 2):
                dist.barrier()
                if name == "fit":
                    times = train_with_fit(kind, workers, device, folder / f"{kind}-{ranks}-{number}")
                else:
                    times = train_plainly(kind, workers, device)
                found.setdefault(kind, {}).setdefault(name, []).append(pace(times, SAMPLES[kind], ranks))
        if rank == 0:
            latest = {kind: round(pair["fit"][-1] / pair["plain"][-1], 3) for kind, pair in found.items()}
            note(f"  {ranks} ranks, round {number + 1}: {latest}")
            (folder / f"found-{ranks}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def conclude(paces: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Return the figures of all cells, and the lowest ratio. ``paces``: by cell and contender, the samples per second
    of each round. Pure."""
    cells = {}
    for cell, found in paces.items():
        ratios = [ours / plain for ours, plain in zip(found["fit"], found["plain"], strict=True)]
        _, low, high = interval([ratios])
        cells[cell] = {
            "fit_samples_per_second": round(statistics.median(found["fit"])),
            "plain_samples_per_second": round(statistics.median(found["plain"])),
            "ratio": round(float(np.median(ratios)), 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
    return {"min_vs_plain": min((cell["ratio"] for cell in cells.values()), default=None), "cells": cells}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--workers", type=int, default=2, help="workers of each rank for the kind python")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/fit.json, on a quiet machine")
    parser.add_argument("--busy", action="store_true", help="save in spite of other work, and say so")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a rank
    options = parser.parse_args()
    if options.folder is not None:
        return be_rank(options.kinds, options.rounds, options.workers, options.device, options.folder)
    load, paces, failed = os.getloadavg()[0], dict[str, dict[str, list[float]]](), dict[str, str]()
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone", "-m",
                "benchmarks.fit", "--folder", folder, "--rounds", str(options.rounds), "--workers",
                str(options.workers), "--device", options.device, "--kinds", *options.kinds,
            ]  # fmt: skip
            done = subprocess.run(command, stdout=sys.stderr, env={**os.environ, "OMP_NUM_THREADS": "1"})
            answer = Path(folder, f"found-{ranks}.json")
            if done.returncode or not answer.is_file():
                failed[f"{ranks} ranks"] = f"exit code {done.returncode}"
            found = json.loads(answer.read_text()) if answer.is_file() else {}
        paces |= {f"{kind}, {ranks} ranks": of_both for kind, of_both in found.items()}
    busy = is_busy(load)
    figures = {
        "rounds": options.rounds, "batch": BATCH, "workers": options.workers, "device": options.device,
        "load_before": round(load, 2), **({"busy": True} if busy else {}), **({"failed": failed} if failed else {}),
        **conclude(paces),
    }  # fmt: skip
    tell("fit", figures, options.save and (options.busy or not busy) and not failed)


if __name__ == "__main__":
    main()
