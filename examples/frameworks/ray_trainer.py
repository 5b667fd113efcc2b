"""The stock model, trained by the workers of Ray Train: `trainer.RayTrainer`.

    pip install "ray[train,tune]>=2.60"
    python examples/frameworks/ray_trainer.py

It uses the Ray cluster that RAY_ADDRESS names, and starts one on this machine where that is not set. On a cluster, give
a run directory that all machines see as the first argument.
"""

from __future__ import annotations

import sys

import torch
from random_walk import make_windows

from trainer import DistributedConfig, RayTrainer
from trainer.config import FactoryConfig
from trainer.model.build import build_loss, build_model


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
