"""What all five files have: a model, data, and parts that are the same whichever tool trains. None of it is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def make_model() -> nn.Sequential:
    """Return a network from eight numbers to the logits of three classes."""
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def make_samples(count: int, seed: int) -> TensorDataset:
    """Return samples of three classes, which differ in their mean."""
    chance = torch.Generator().manual_seed(seed)
    target = torch.randint(3, (count,), generator=chance)
    return TensorDataset(torch.randn(count, 8, generator=chance) + target[:, None], target)


train, valid = make_samples(256, 1), make_samples(100, 2)
loss = nn.CrossEntropyLoss()


def warm_up(step: int) -> float:
    """Return the multiple of the learning rate in a step: a schedule of one's own."""
    return min(1.0, (step + 1) / 10)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters in two groups: weights, and norms and biases, which do not decay."""
    weights = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


class F1:
    """The macro-averaged F1 score, by the protocol of torchmetrics, which need not be there."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self.counts = torch.zeros(3, 3)

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Take a batch: outputs (n, 3), target (n,)."""
        self.counts += torch.bincount(3 * target.cpu() + outputs.argmax(1).cpu(), minlength=9).view(3, 3)

    def compute(self) -> float:
        """Return the score."""
        found, wanted, right = self.counts.sum(0), self.counts.sum(1), self.counts.diag()
        return float((2 * right / (found + wanted).clamp(min=1)).mean())


def read_file(number: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the samples of one of eight files, which are read from beginning to end."""
    yield from make_samples(32, 10 + number)


def make_generator() -> nn.Sequential:
    """Return a network from two random numbers to eight."""
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 8))


def make_critic() -> nn.Sequential:
    """Return a network from eight numbers to a logit: are they real?"""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def judge(judged: Tensor, real: bool) -> Tensor:
    """Return the loss of a critic's logits (n, 1), one for each sample (n,)."""
    wanted = torch.full_like(judged, float(real))
    return nn.functional.binary_cross_entropy_with_logits(judged, wanted, reduction="none").squeeze(1)
