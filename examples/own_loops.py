"""Loops of your own, which survive lost nodes: a GAN, a contrastive loss over all ranks, and a policy that learns from
episodes.

    python examples/own_loops.py gan
    torchrun --nproc-per-node 2 examples/own_loops.py contrastive --run-dir runs/contrastive
    dtrain train --script examples/own_loops.py -- policy

What is in the block `with batch:` counts on all ranks or on none. The data are made up: points on a ring, and a
corridor to walk along.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize
from torch.utils.data import Dataset, TensorDataset

from trainer import Loop

CORRIDOR, MOST_MOVES = 6, 20


def ring(points: int = 1000) -> TensorDataset:
    """Return points of the plane on a ring."""
    chance = torch.Generator().manual_seed(0)
    angle = 2 * math.pi * torch.rand(points, generator=chance)
    radius = 1.0 + 0.1 * torch.randn(points, generator=chance)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1))


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs))


def train_gan(loop: Loop, data: Dataset[Any]) -> nn.Module:
    """Train a generator of such points against a critic, which steps twice in each batch, and return it. With two
    optimizers the batch is committed at the end of its block: both have stepped, or none."""
    generator, critic = network(2, 2), network(2, 1)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    generator, critic, g_optimizer, c_optimizer = loop.setup(generator, critic, g_optimizer, c_optimizer)

    def judge(points: Tensor, real: bool) -> Tensor:
        judged = critic(points).squeeze(1)
        return binary_cross_entropy_with_logits(judged, torch.full_like(judged, float(real)), reduction="none")

    for batch in loop.batches(data):
        with batch:
            for _ in range(2):
                for (real,) in batch:
                    made = generator(torch.randn_like(real)).detach()
                    loop.backward(judge(real, True) + judge(made, False))
                c_optimizer.step()
            for (real,) in batch:
                made = generator(torch.randn_like(real))
                loop.backward(judge(made, True))
            g_optimizer.step()
            loop.log("radius", made.detach().norm(dim=1).mean())
    return generator


def train_contrastive(loop: Loop, data: Dataset[Any]) -> nn.Module:
    """Train an embedding by which each point finds its own shifted copy among those of the whole global batch, on
    whichever ranks they are, and return it."""
    model = network(2, 8)
    model, optimizer = loop.setup(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    for batch in loop.batches(data):
        with batch:
            pairs = [(normalize(model(points)), normalize(model(points + 0.05))) for (points,) in batch]
            ours, copies = zip(*pairs, strict=True)
            scores = torch.cat(ours) @ loop.gather(copies).T / 0.1
            loop.backward(cross_entropy(scores, loop.own_rows(), reduction="none"))
            optimizer.step()
    return model


def train_policy(loop: Loop, episodes: int = 1000) -> nn.Module:
    """Train a policy to walk to the end of a corridor (REINFORCE with a baseline), and return it. A sample is an
    episode: its position seeds it, so that each episode counts once at any number of ranks."""
    policy = network(1, 2)
    policy, optimizer = loop.setup(policy, torch.optim.Adam(policy.parameters(), lr=1e-2))
    for batch in loop.batches(TensorDataset(torch.arange(episodes))):
        with batch:
            for (seeds,) in batch:
                likelihood, moves = walk(policy, len(seeds))
                loop.backward(likelihood * (moves - moves.mean()))  # fewer moves are better
            optimizer.step()
            loop.log("moves", moves.mean())
    return policy


def walk(policy: nn.Module, episodes: int) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the likelihood of each episode's moves (n,), and how many they were (n,)."""
    place, moves, likelihood = torch.zeros(episodes), torch.zeros(episodes), torch.zeros(episodes)
    for _ in range(MOST_MOVES):
        walks = place < CORRIDOR
        choice = torch.distributions.Categorical(logits=policy(place[:, None] / CORRIDOR))
        action = choice.sample()
        likelihood = likelihood + torch.where(walks, choice.log_prob(action), 0.0)
        place = torch.where(walks, (place + 2 * action - 1).clamp(min=0), place)
        moves = moves + walks.float()
    return likelihood, moves


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description="Train by a loop of your own.")
    parser.add_argument("kind", choices=("gan", "contrastive", "policy"))
    parser.add_argument("--run-dir", help="where checkpoints and events are written; a new folder below runs without")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    loop = Loop({"epochs": options.epochs, "batch_size_per_gpu": 50}, run_dir=options.run_dir)
    if options.kind == "gan":
        train_gan(loop, ring())
    elif options.kind == "contrastive":
        train_contrastive(loop, ring())
    else:
        train_policy(loop)
    assert loop.result is not None
    print(f"{loop.result.steps} steps, {loop.result.samples_seen} samples: {loop.result.run_dir}")


if __name__ == "__main__":
    main()
