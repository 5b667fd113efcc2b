"""Train your own model under torchrun, epoch by epoch, with the dataset, loss and settings of a job.

    torchrun --nproc-per-node 2 examples/torchrun_script.py --config job.json

``job.json`` is the file that ``python -m trainer`` takes: the script uses its dataset, loss and training settings, but
not its model. `trainer.Trainer` needs no such file (``examples/digits.py``), and a loop of your own has `trainer.Loop`
(``examples/own_loops.py``).
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainer.config import JobConfig, parse_job
from trainer.data.shards import DataShardManager
from trainer.losses import build_loss
from trainer.run import DistributedTrainer


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of single training samples: a window (days, features) and its target (). Any other dataset works."""

    def __init__(self, shards: DataShardManager) -> None:
        self.shards = shards

    def __len__(self) -> int:
        return self.shards.count("train")

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(self.shards.end_rows("train", np.array([index])))
        windows, target = self.shards.gather(rows)
        return windows[0], target[0]


def make_model(shards: DataShardManager, outputs: int) -> nn.Module:
    """Return a small network from windows (batch, days, features) to (batch, outputs). Its initial weights may differ
    between ranks: all begin with those of rank 0."""
    inputs = shards.spec.window * len(shards.spec.features)
    return nn.Sequential(
        nn.Flatten(), nn.LayerNorm(inputs), nn.Linear(inputs, 32), nn.GELU(), nn.Linear(32, outputs)
    )  # fmt: skip


def train_epochs(trainer: DistributedTrainer, job: JobConfig) -> None:
    """Carry out the steps in their order: join the peers, give the model, train each epoch."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trainer.initialize_distributed(world_size, rank)
    shards = DataShardManager(job.dataset.uri)
    outputs = int(build_loss(job.loss, shards.spec).outputs)  # type: ignore[arg-type]
    model = trainer.setup_data_parallel(make_model(shards, outputs))
    loader = DataLoader(Windows(shards), batch_size=job.training.batch_size_per_gpu, shuffle=True)
    for epoch in range(job.training.epochs):
        found = trainer.train_epoch(loader, epoch)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {found['loss']:.6f} over {found['samples']:.0f} samples")
    weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
    print(f"rank {rank}: sha256 of the weights {hashlib.sha256(weights).hexdigest()}", flush=True)


def main() -> None:
    """Train by the settings of ``--config``, in the process that torchrun has started."""
    parser = argparse.ArgumentParser(description="Train your own model under torchrun.")
    parser.add_argument("--config", required=True, type=Path, help="job.json")
    options = parser.parse_args()
    job = parse_job(options.config.read_text(), source=str(options.config))
    torch.manual_seed(int(os.environ["RANK"]))  # different weights on each rank: only those of rank 0 count
    trainer = DistributedTrainer(job)
    try:
        train_epochs(trainer, job)
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
