"""Trainings of a caller's own model and data, as a script starts them: data, models, and processes that call `fit`."""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from harness.accuracy import Accuracy
from harness.waiting import until
from harness.worlds import Run, free_port, launched
from trainer import Callback, DistributedConfig, Trainer
from trainer import Run as TrainingRun
from trainer.config import TrackingConfig
from trainer.runtime.launch import Launch

SAMPLES, CLASSES, BATCH = 150, 3, 10
QUIET = TrackingConfig(tensorboard=False)
SETTINGS: dict[str, Any] = {
    "world_size": 3,
    "gradient_accumulation_steps": 2,
    "batch_size_per_gpu": BATCH,
    "epochs": 3,
    "log_frequency": 1,
    "checkpoint_frequency": 2,
    "threads_per_rank": 1,
    "monitor_interval_seconds": 0.5,
    "health_check_seconds": 0.3,
}
"""Nine steps of six micro-batches."""


def points(samples: int = SAMPLES, seed: int = 0) -> TensorDataset:
    """Points of the plane in three classes, which a small network can tell apart."""
    chance = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 2, generator=chance)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0.5).long())


class Shaken(Dataset[tuple[Tensor, Tensor]]):
    """The same points, each read anew with noise of three generators."""

    def __init__(self, samples: int = SAMPLES, seed: int = 0) -> None:
        self.points = points(samples, seed)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.points[position]
        shift = 0.1 * torch.randn(2) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return inputs + shift, target


class Hanging(Shaken):
    """In the worker of one rank, reading never ends after a while; the worker tells who it is."""

    def __init__(self, rank: int, folder: str) -> None:
        super().__init__()
        self.rank, self.folder, self.read = rank, folder, 0

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        self.read += get_worker_info() is not None
        if self.rank == 1 and self.read > 2 * BATCH:
            Path(self.folder, "worker").write_text(str(os.getpid()))
            time.sleep(600)
        return super().__getitem__(position)


class Broken(Shaken):
    """One sample cannot be read."""

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        if position == 77:
            raise KeyError("no picture 77")
        return super().__getitem__(position)


class Texts(Dataset[dict[str, Any]]):
    """Samples that are no tensors: a text of its own length, and numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {"text": "a" * (1 + position % 7), "number": float(position % 7)}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A nested batch, with a tuple and the texts themselves."""
    lengths = torch.tensor([[float(len(sample["text"]))] for sample in samples])
    numbers = torch.tensor([sample["number"] for sample in samples])
    return {"pair": (lengths, numbers), "texts": [sample["text"] for sample in samples]}


class LengthTask:
    """Forecasts a number from the length of a text."""

    def loss(self, model: Any, batch: dict[str, Any]) -> Tensor:
        lengths, numbers = batch["pair"]
        assert [len(text) for text in batch["texts"]] == lengths.flatten().int().tolist()
        return (model(lengths).squeeze(1) - numbers) ** 2

    def metrics(self, model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
        lengths, numbers = batch["pair"]
        return {"absolute": (model(lengths).squeeze(1) - numbers).abs()}


def network(seed: int = 0, norm: bool = False) -> nn.Sequential:
    """A smooth network."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, CLASSES))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


class Right(Accuracy):
    """The share of samples in their class, of a whole split."""

    def compute(self) -> float:
        assert self.seen in (3, 40), "each sample once"
        return super().compute()


class Average(Callback):
    """A moving average of the weights, whose sum is told at the end."""

    def on_start(self, run: TrainingRun) -> None:
        self.averaged = AveragedModel(run.model, avg_fn=lambda kept, new, _: 0.8 * kept + 0.2 * new)

    def on_world(self, run: TrainingRun) -> None:
        run.log("ranks", run.world_size)

    def on_step(self, run: TrainingRun) -> None:
        self.averaged.update_parameters(run.model)

    def on_end(self, run: TrainingRun) -> None:
        run.log("average", sum(float(each.double().sum()) for each in self.averaged.parameters()))

    def state_dict(self) -> dict[str, Any]:
        return self.averaged.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averaged.load_state_dict(state)


def fit(run_dir: Path, data: str = "shaken", workers: int = 0, **settings: Any) -> None:
    """What a script does: train with parts of its own, and write what `fit` has returned beside its run directory."""
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(rank)  # ranks begin with different weights: those of rank 0 count
    kinds: dict[str, Any] = {
        "points": points,
        "shaken": Shaken,
        "hanging": lambda: Hanging(rank, str(run_dir.parent)),
        "own": lambda: points(seed=rank),
    }
    config = DistributedConfig(**{**SETTINGS, "monitor": "right", "mode": "max", **settings})
    # As in a script: ranks that were forked by a server would have another one start their workers.
    context = "fork" if workers else None
    loader = DataLoader(
        kinds[data](), batch_size=BATCH, num_workers=workers, shuffle=True, multiprocessing_context=context
    )
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, CLASSES)) if rank else network()
    trainer = Trainer(
        model, config, metrics={"right": Right()}, optimizer=momentum, lr_scheduler=partial(OneCycleLR, max_lr=0.5),
        callbacks=[Average()], run_dir=run_dir, tracking=QUIET,
    )  # fmt: skip
    result = trainer.fit(loader, points(40, 1))
    Path(f"{run_dir}-rank{rank}.json").write_text(json.dumps({"steps": result.steps, "test": dict(result.test)}))


def be_script(environment: Mapping[str, str], log: str, run_dir: str, options: Mapping[str, Any]) -> None:
    """The life of a forked process that runs such a script."""
    os.setpgid(0, 0)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    script = options.get("script", fit)
    try:
        script(Path(run_dir), **{name: value for name, value in options.items() if name != "script"})
    except Exception:
        traceback.print_exc()
        sys.exit(1)


class Scripts(Run):
    """The ranks of one launch of a script."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.processes = run_dir, {}

    def start(self, world: int = 1, faults: Sequence[Any] = (), launch: bool = False, **options: Any) -> Scripts:
        """Start the ranks; with ``launch`` as the nodes of a cluster, which may regroup."""
        port = free_port()
        for rank in range(world):
            environment = {**launched(rank, world, port=port), "DTRAIN_FAULTS": json.dumps(faults)}
            if launch:
                environment |= {**launched(rank, world, 1, port), **Launch(is_elastic=True).variables()}
            log = self.run_dir.parent / f"{self.run_dir.name}-{rank}.log"
            self.fork(rank, be_script, environment, str(log), str(self.run_dir), options)
        return self

    def wait(self, seconds: float = 200.0) -> list[int | None]:
        """The exit codes, None for those that still run after all this time."""
        codes = self.wait_for(seconds)
        self.kill()
        self.processes.clear()
        return codes

    def until(self, true: Callable[[], Any]) -> None:
        """Wait for something; fail at once when one is gone who could bring it about."""
        until(true, self.log, 150, lambda: all(process.is_alive() for process in self.processes.values()))

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.run_dir.parent.glob("*.log")))
