"""Digits as images, and a small convolutional network: a model of one's own, trained by `trainer.Trainer`.

The images are scikit-learn's (1,797 of 8 x 8 pixels). Run it with

    python examples/digits.py

or, with the same script, on three nodes of the cluster, which may be lost while it trains:

    dtrain train --script examples/digits.py --nodes 3
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from trainer import DistributedConfig, Trainer


def read_digits() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Return the images (n, 1, 8, 8) from 0 to 1 with their digits (n,), for training, validation and test."""
    found = load_digits()
    images = torch.from_numpy(found.images.astype(np.float32) / 16.0)[:, None]
    digits = torch.from_numpy(found.target.astype(np.int64))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(digits)))
    parts = (order[:1297], order[1297:1547], order[1547:])
    train, valid, test = (TensorDataset(images[part], digits[part]) for part in parts)
    return train, valid, test


def make_model() -> nn.Module:
    """Return a network from images (n, 1, 8, 8) to the logits of ten digits (n, 10)."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )


def is_right(outputs: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
    """Return 1 for each image whose most probable digit is the right one (n,)."""
    return (outputs.argmax(1) == digits).float()


def main() -> None:
    """Train, and print how many digits of the test split are recognised."""
    torch.manual_seed(0)
    config = DistributedConfig(
        epochs=12, batch_size_per_gpu=32, gradient_accumulation_steps=1, world_size=1, learning_rate=3e-3
    )
    trainer = Trainer(make_model(), config, loss=nn.CrossEntropyLoss(), metrics={"accuracy": is_right})
    result = trainer.fit(*read_digits())
    print(f"{result.test['accuracy']:.1%} of {result.test['samples']} digits, after {result.steps} steps")


if __name__ == "__main__":
    main()
