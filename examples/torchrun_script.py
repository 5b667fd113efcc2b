"""Train your own model under torchrun, with your own data loader and either `train_epoch` or your own loop.

    torchrun --nproc-per-node 2 examples/torchrun_script.py --config job.json
    torchrun --nproc-per-node 2 examples/torchrun_script.py --config job.json --own-loop

``job.json`` is the file that ``python -m trainer`` takes: the script uses its dataset, loss and training settings, but
not its model. There are no checkpoints and no recovery from a lost node here; for those, name the model in
``job.json`` (``examples/own_model``).
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

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
    between ranks: `setup_data_parallel` gives all ranks those of rank 0."""
    inputs = shards.spec.window * len(shards.spec.features)
    return nn.Sequential(
        nn.Flatten(), nn.LayerNorm(inputs), nn.Linear(inputs, 32), nn.GELU(), nn.Linear(32, outputs)
    )  # fmt: skip


def train_by_hand(
    trainer: DistributedTrainer, model: nn.Module, optimizer: torch.optim.Optimizer, criterion: nn.Module,
    loader: DataLoader[tuple[Tensor, Tensor]],
) -> dict[str, float]:  # fmt: skip
    """Train one epoch with your own loop, and return the sums of loss and samples over all ranks. Each backward pass
    *sums* gradients over ranks, so the loss is divided by the number of samples of all ranks."""
    device, totals = next(model.parameters()).device, {"loss_sum": 0.0, "samples": 0.0}
    for windows, target in loader:
        everywhere = trainer.synchronize_metrics({"batch": float(len(target))})["batch"]
        optimizer.zero_grad()
        loss = criterion(model(windows.to(device)), target.to(device)).sum()
        (loss / everywhere).backward()
        optimizer.step()
        totals["loss_sum"] += loss.item()
        totals["samples"] += len(target)
    return trainer.synchronize_metrics(totals)


def train_epochs(trainer: DistributedTrainer, job: JobConfig, epochs: int, own_loop: bool) -> None:
    """Carry out the four steps in their order: join the peers, share the model, train, sum the metrics of all ranks."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trainer.initialize_distributed(world_size, rank)
    shards = DataShardManager(job.dataset.uri)
    criterion = build_loss(job.loss, shards.spec)
    model = trainer.setup_data_parallel(make_model(shards, int(criterion.outputs)))  # type: ignore[arg-type]
    criterion.to(next(model.parameters()).device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.training.learning_rate)
    data = Windows(shards)
    # All ranks must have equally many batches: the sampler repeats some samples if necessary.
    sampler: DistributedSampler[tuple[Tensor, Tensor]]
    sampler = DistributedSampler(data, world_size, rank, shuffle=True, seed=job.training.seed)
    loader = DataLoader(data, batch_size=job.training.batch_size_per_gpu, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        if own_loop:
            found = train_by_hand(trainer, model, optimizer, criterion, loader)
        else:
            found = trainer.train_epoch(loader, epoch)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {found['loss']:.6f} over {found['samples']:.0f} samples")
    weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
    print(f"rank {rank}: sha256 of the weights {hashlib.sha256(weights).hexdigest()}", flush=True)


def main() -> None:
    """Train by the settings of ``--config``, in the process that torchrun has started."""
    parser = argparse.ArgumentParser(description="Train your own model under torchrun.")
    parser.add_argument("--config", required=True, type=Path, help="job.json")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--own-loop", action="store_true", help="write the loop here instead of calling train_epoch")
    options = parser.parse_args()
    job = parse_job(options.config.read_text(), source=str(options.config))
    torch.manual_seed(int(os.environ["RANK"]))  # different weights on each rank: only those of rank 0 count
    trainer = DistributedTrainer(job)
    try:
        train_epochs(trainer, job, options.epochs, options.own_loop)
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
