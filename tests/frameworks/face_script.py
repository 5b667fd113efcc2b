"""A script that trains by the names of a framework: ``python face_script.py RUN_DIR FACE [JSON of options]``. With
``"script_init": true`` it starts Horovod by itself, as Horovod's own documentation has it."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainer


def points(samples: int, seed: int) -> TensorDataset:
    """Points of the plane in two classes."""
    chance = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 2, generator=chance)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def hits(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == target).float()


def main(run_dir: str, face: str, options: dict[str, Any]) -> None:
    rank = 0
    if options.pop("script_init", False):
        import horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()
    torch.manual_seed(rank)  # ranks begin with different weights: those of rank 0 count
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    settings = {"epochs": 2, "batch_size": 10, "learning_rate": 0.02, "threads_per_rank": 1, "log_frequency": 1}
    chosen = getattr(trainer, face)(
        model, loss_fn=nn.CrossEntropyLoss(), metrics={"accuracy": hits}, checkpoint_dir=run_dir, verbose=False,
        world_size=2, **settings, **options,
    )  # fmt: skip
    history = chosen.fit(points(120, 0), points(40, 1))
    mean = None
    if face == "HorovodTrainer":
        import horovod.torch as hvd

        mean = chosen.metric_average(hvd.rank() if hvd.is_initialized() else 0.0, name="rank")
    said = {"accuracy": history.best_accuracy, "steps": history.result.steps, "mean": mean}
    print("said " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
