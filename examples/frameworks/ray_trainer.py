"""The stock model, trained by the workers of Ray Train: `trainer.RayTrainer`.

    pip install "ray[train,tune]>=2.60"
    python examples/frameworks/ray_trainer.py

It uses the Ray cluster that RAY_ADDRESS names, and starts one on this machine where that is not set. On a cluster, give
a run directory that all machines see as the first argument.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np
import torch
from torch.utils.data import TensorDataset

from trainer import DistributedConfig, RayTrainer
from trainer.config import FactoryConfig
from trainer.model.losses import build_loss
from trainer.model.stock import build_model
from trainer.spec import DataSpec

WINDOW, FEATURES = 16, ("return", "absolute_return")


def make_windows(days: int = 1500) -> tuple[DataSpec, list[TensorDataset]]:
    """Return windows (n, WINDOW, 2) of a random walk whose volatility changes slowly, each with the return of the day
    after it (n,), for training, validation and test; and before them what describes them."""
    random = np.random.default_rng(0)
    spread = 0.01 * np.exp(0.6 * np.sin(np.arange(days) / 30))
    returns = (random.standard_normal(days) * spread).astype(np.float32)
    rows = np.column_stack([returns, np.abs(returns)])
    inputs = np.lib.stride_tricks.sliding_window_view(rows, WINDOW, axis=0)[:-1].swapaxes(1, 2)
    target = returns[WINDOW:]
    edges = [0, len(target) * 6 // 10, len(target) * 8 // 10, len(target)]
    splits = [
        TensorDataset(torch.from_numpy(inputs[first:last].copy()), torch.from_numpy(target[first:last].copy()))
        for first, last in itertools.pairwise(edges)
    ]
    spec = DataSpec(
        dataset_id="walk", features=FEATURES, window=WINDOW, horizon=1, target="next_return",
        feature_mean=tuple(rows.mean(0).tolist()), feature_std=tuple(rows.std(0).tolist()),
        target_mean=float(target.mean()), target_std=float(target.std()),
    )  # fmt: skip
    return spec, splits


def main() -> None:
    """Train on two workers, and print the loss on the test split."""
    spec, (train, valid, test) = make_windows()
    torch.manual_seed(0)
    loss = build_loss(FactoryConfig(factory="student_t"), spec)
    model = build_model(FactoryConfig(factory="tcn"), spec, outputs=3)
    config = DistributedConfig(epochs=3, batch_size_per_gpu=32, gradient_accumulation_steps=2)
    run_dir = sys.argv[1] if len(sys.argv) > 1 else None
    trainer = RayTrainer(model, config, num_workers=2, loss=loss, run_dir=run_dir)
    result = trainer.fit(train, valid, test)
    print(f"test loss {result.test['loss']:.4f} after {result.steps} steps, in {result.run_dir}")


if __name__ == "__main__":
    main()
