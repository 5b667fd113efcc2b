"""Measure the samples per second of a script's own training, by `trainer.Trainer.fit` and by `trainer.Loop`, against
the loop of torch's tutorial of DDP.

Run `python -m benchmarks.fit`. All train the same model on the same dataset in the same processes, one after the other
in each round, in random order: gloo and one thread per rank on a CPU, with the same batch, workers, collate function,
loss and optimizer, without clipping. The plain loop has DDP, DataLoader and DistributedSampler, keeps its workers
between epochs, and has malloc set as the trainer sets it. The trainer is as it is, with reports, monitor and
TensorBoard; none saves checkpoints meanwhile but those of the best weights. Time counts on rank 0 from the end of the
first epoch to the last batch, read where all call the same loss: pauses between epochs count, start and end do not.

    tensors_adamw     rows of tensors (64 numbers, 10 classes), no workers, fused AdamW
    tensors_sgd       the same with SGD with momentum
    python_adamw      a dataset with work in Python for each sample, two workers per rank
    dictionary_sgd    samples that a collate function of one's own makes into a mapping, no workers
    measure_adamw     rows of tensors, and after each epoch the share of right classes of a whole split of 1,024, held
                      against torchmetrics' protocol, by which the best weights are kept and saved; the plain loop sums
                      its counts over ranks, and saves with torch.save, as one does by hand

    min_vs_plain   the lowest median over rounds of samples per second of `fit` divided by that of the plain loop, over
                   all cases and numbers of ranks; above 1 `fit` is faster
    min_loop_vs_plain   the same of a `Loop`, in the cases without a measure
    cells          by case and ranks: samples per second (medians), and the ratios with their 95 % intervals (bootstrap
                   over rounds)
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from benchmarks.host import in_short, interval, is_busy, note, options_of, tell
from harness.accuracy import Accuracy
from trainer import DistributedConfig, Loop, Trainer
from trainer.runtime.host_memory import keep_freed_memory

BATCH, CLASSES, WIDTH, WORKERS = 32, 10, 64, 2
SAMPLES = {"tensors": 4096, "python": 2048, "dictionary": 4096}
JUDGED = 1024
EPOCHS = 5
"""Epochs of each training, of which the first is not counted."""
CONTENDERS = ("fit", "loop", "plain")


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained."""

    data: str
    optimizer: str
    measured: bool = False
    every: int = 1
    """The number of rounds of which one has this case: where worker processes start, a training takes ten times as
    long."""


CASES = {
    "tensors_adamw": Case("tensors", "adamw"),
    "tensors_sgd": Case("tensors", "sgd"),
    "python_adamw": Case("python", "adamw", every=3),
    "dictionary_sgd": Case("dictionary", "sgd"),
    "measure_adamw": Case("tensors", "adamw", measured=True),
}


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


def parts_of(batch: Any) -> tuple[Tensor, Tensor]:
    """Return the inputs and the classes of a batch."""
    return (batch["values"], batch["class"]) if isinstance(batch, dict) else (batch[0], batch[1])


class TimedTask:
    """The cross entropy, with the times at which it is asked for in training."""

    def __init__(self, measured: bool = False) -> None:
        self.times: list[float] = []
        self.measures = {"right": Accuracy()} if measured else {}

    def loss(self, model: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """Return one loss per sample."""
        values, target = parts_of(batch)
        outputs = model(values)
        if outputs.requires_grad:
            self.times.append(time.monotonic())
        return nn.functional.cross_entropy(outputs, target, reduction="none")

    def measured(self, model: Callable[[Any], Tensor], batch: Any) -> tuple[Tensor, Tensor]:
        """Return what a measure is updated with."""
        values, target = parts_of(batch)
        return model(values), target


def make_data(case: Case, samples: int | None = None) -> tuple[Dataset[Any], dict[str, Any]]:
    """Return a dataset, and the options of a loader for it."""
    chance = torch.Generator().manual_seed(0)
    rows = torch.rand(samples or SAMPLES[case.data], WIDTH, generator=chance)
    target = (rows.sum(1) * 10).long() % CLASSES
    if case.data == "tensors":
        return TensorDataset(rows, target), {"batch_size": BATCH}
    if case.data == "python":
        # Not forked: threads of the trainings before in this process may hold locks that a worker would wait for.
        return Worked(rows, target), {
            "batch_size": BATCH, "num_workers": WORKERS, "multiprocessing_context": "forkserver",
        }  # fmt: skip
    return Named(rows, target), {"batch_size": BATCH, "collate_fn": collate_named}


def make_model() -> nn.Module:
    """Return the network, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a case."""
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)


def pace(times: Sequence[float], samples: int, ranks: int) -> float:
    """Return the samples per second of all ranks from the times of one rank's batches after its first epoch. Pure."""
    per_epoch = samples // (BATCH * ranks)
    counted = times[per_epoch:]
    return (len(counted) - 1) * BATCH * ranks / (counted[-1] - counted[0])


def train_with_fit(case: Case, run_dir: Path) -> list[float]:
    """Train with the trainer; the times of this rank's batches."""
    data, options = make_data(case)
    task = TimedTask(case.measured)
    config = DistributedConfig(
        epochs=EPOCHS, clip_norm=None, threads_per_rank=1, schedule="constant", warmup_steps=0,
        checkpoint_frequency=1_000_000, backend="gloo", monitor="right" if case.measured else "loss",
        mode="max" if case.measured else "min",
    )  # fmt: skip
    trainer = Trainer(
        make_model(), config, task=task, optimizer=lambda model: make_optimizer(case, model), run_dir=run_dir,
        progress=False,
    )  # fmt: skip
    valid = make_data(case, JUDGED)[0] if case.measured else None
    steps = EPOCHS * -(-SAMPLES[case.data] // (BATCH * int(os.environ["WORLD_SIZE"])))
    trainer.fit(DataLoader(data, **options), valid)
    return task.times[-steps:]  # what comes before are trials


def train_with_loop(case: Case, run_dir: Path) -> list[float]:
    """Train with a loop of one's own; the times of this rank's batches."""
    data, options = make_data(case)
    task, model = TimedTask(), make_model()
    config = {
        "epochs": EPOCHS, "threads_per_rank": 1, "checkpoint_frequency": 1_000_000, "backend": "gloo",
    }  # fmt: skip
    loop = Loop(config, run_dir=run_dir, progress=False)
    model, optimizer = loop.setup(model, make_optimizer(case, model))
    for batch in loop.batches(DataLoader(data, **options)):
        with batch:
            for part in batch:
                loop.backward(task.loss(model, part))
            optimizer.step()
    return task.times


def train_plainly(case: Case, folder: Path) -> list[float]:
    """Train with the loop of torch's tutorial; the times of this rank's batches."""
    best = -1.0
    data, options = make_data(case)
    task, model = TimedTask(), DistributedDataParallel(make_model())
    optimizer = make_optimizer(case, model)
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, sampler=sampler, persistent_workers="num_workers" in options, **options)
    judged = make_data(case, JUDGED)[0]
    of_judged: DistributedSampler[Any] = DistributedSampler(judged, shuffle=False)
    judge = DataLoader(judged, sampler=of_judged, **options)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            task.loss(model, batch).mean().backward()
            optimizer.step()
        if case.measured:
            model.eval()
            counted = torch.zeros(3, dtype=torch.float64)
            with torch.no_grad():
                for batch in judge:
                    values, target = parts_of(batch)
                    outputs = model.module(values)
                    counted[0] += nn.functional.cross_entropy(outputs, target, reduction="sum")
                    counted[1] += (outputs.argmax(1) == target).sum()
                    counted[2] += len(target)
            dist.all_reduce(counted)
            model.train()
            if counted[1] / counted[2] > best:
                best = float(counted[1] / counted[2])
                if dist.get_rank() == 0:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                    torch.save(state, folder / "best.pt")
    return task.times


def be_rank(names: Sequence[str], rounds: int, folder: Path) -> None:
    """Train all cases in all rounds with all contenders, and let rank 0 write the samples per second."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    keep_freed_memory()
    order, found = random.Random(0), dict[str, dict[str, list[float]]]()
    dist.init_process_group("gloo", init_method=(folder / f"store-{ranks}").as_uri(), rank=rank, world_size=ranks)
    for number in range(rounds):
        for name in [each for each in names if number % CASES[each].every == 0]:
            case = CASES[name]
            for contender in _shuffled(order, case):
                dist.barrier()
                run_dir = folder / f"{name}-{ranks}-{number}-{contender}"
                if contender == "fit":
                    times = train_with_fit(case, run_dir)
                elif contender == "loop":
                    times = train_with_loop(case, run_dir)
                else:
                    times = train_plainly(case, folder)
                found.setdefault(name, {}).setdefault(contender, []).append(pace(times, SAMPLES[case.data], ranks))
        if rank == 0:
            latest = {name: round(each["fit"][-1] / each["plain"][-1], 3) for name, each in found.items()}
            note(f"  {ranks} ranks, round {number + 1}: {latest}")
            (folder / f"found-{ranks}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _shuffled(order: random.Random, case: Case) -> list[str]:
    found = [each for each in CONTENDERS if each != "loop" or not case.measured]
    order.shuffle(found)
    return found


def conclude(paces: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Return the figures of all cells, and the lowest ratios. ``paces``: by cell and contender, the samples per second
    of each round. Pure."""
    cells: dict[str, Any] = {}
    lowest: dict[str, list[float]] = {"fit": [], "loop": []}
    for cell, found in paces.items():
        cells[cell] = {f"{each}_samples_per_second": round(statistics.median(values)) for each, values in found.items()}
        for each in found.keys() - {"plain"}:
            ratios = [ours / plain for ours, plain in zip(found[each], found["plain"], strict=True)]
            cells[cell][f"{each}_vs_plain"] = figures = in_short(interval([ratios]))
            lowest[each].append(figures["ratio"])
    return {
        "min_vs_plain": min(lowest["fit"], default=None),
        "min_loop_vs_plain": min(lowest["loop"], default=None),
        "cells": cells,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with these command-line arguments; return 1 if ranks failed, else 0."""
    parser = options_of("fit", __doc__)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a rank
    options = parser.parse_args(arguments)
    if options.folder is not None:
        be_rank(options.cases, options.rounds, options.folder)
        return 0
    load, paces, failed = os.getloadavg()[0], dict[str, dict[str, list[float]]](), dict[str, str]()
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone", "-m",
                "benchmarks.fit", "--folder", folder, "--rounds", str(options.rounds), "--cases", *options.cases,
            ]  # fmt: skip
            done = subprocess.run(command, stdout=sys.stderr, env={**os.environ, "OMP_NUM_THREADS": "1"})
            answer = Path(folder, f"found-{ranks}.json")
            if done.returncode or not answer.is_file():
                failed[f"{ranks} ranks"] = f"exit code {done.returncode}"
            found = json.loads(answer.read_text()) if answer.is_file() else {}
        paces |= {f"{name}, {ranks} ranks": of_all for name, of_all in found.items()}
    figures = {"rounds": options.rounds, "batch": BATCH, **({"failed": failed} if failed else {}), **conclude(paces)}
    figures |= {"load_before": round(load, 2), **({"busy": True} if is_busy(load) else {})}
    tell("fit", figures, options.save and not failed and not is_busy(load))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
