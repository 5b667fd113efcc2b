"""A small network under Ray Train: the script runs once, on the first node, and Ray places its workers on all of them.

    dtrain launch --engine ray --nodes 2 -- python examples/frameworks/ray_script.py --workers 2

Nothing of dtrain is imported. The Ray that it finds in RAY_ADDRESS is the job's own, and ends with it.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import ray
import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn


def train(settings: dict[str, int]) -> None:
    """Train on one worker."""
    context = ray.train.get_context()
    torch.manual_seed(context.get_world_rank())
    model = prepare_model(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(256, 8)
    targets = inputs @ torch.arange(8.0)[:, None] / 8
    for _ in range(settings["steps"]):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    print(
        f"worker {context.get_world_rank()} of {context.get_world_size()} on {ray.get_runtime_context().get_node_id()}"
    )
    if settings["fail"] and context.get_world_rank() == 0:
        raise RuntimeError("the worker was asked to fail")
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), os.path.join(folder, "weights.pt"))
        ray.train.report({"loss": loss.item()}, checkpoint=Checkpoint.from_directory(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--folder", default=None, help="Where results go, on storage that all nodes share.")
    options = parser.parse_args()
    ray.init(log_to_driver=True)
    print(f"Ray with {sum(node['Alive'] for node in ray.nodes())} nodes at {os.environ['RAY_ADDRESS']}", flush=True)
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": options.steps, "fail": int(options.fail)},
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(storage_path=options.folder and os.path.abspath(options.folder)),
    )
    result = trainer.fit()
    print(f"loss {result.metrics['loss']:.4f} checkpoint {result.checkpoint.path}")
