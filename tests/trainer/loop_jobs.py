"""Loops of a caller's own: one with a schedule and an average of weights, and those of the examples."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fit_jobs import QUIET, SAMPLES, SETTINGS, Shaken, network, points
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from examples.own_loops import ring, train_contrastive, train_gan, train_policy
from trainer import Loop


def loader() -> DataLoader[Any]:
    return DataLoader(Shaken(), batch_size=SETTINGS["batch_size_per_gpu"], shuffle=True)


def rank_seed() -> int:
    """Ranks begin with different weights: those of rank 0 count."""
    return int(os.environ.get("RANK", "0"))


def new_loop(run_dir: Path, **given: Any) -> Loop:
    return Loop(SETTINGS, run_dir=run_dir, tracking=QUIET, progress=False, **given)


class Counter:
    """A registered object whose state each block changes before its step."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def classify(run_dir: Path) -> None:
    """One optimizer, whose step commits, a schedule, an average of weights and a count of global samples."""
    model = network(rank_seed())
    average = AveragedModel(model, avg_fn=lambda kept, new, _: 0.8 * kept + 0.2 * new)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    counter, loop = Counter(), new_loop(run_dir)
    model, average, optimizer, scheduler = loop.setup(model, average, optimizer, StepLR(optimizer, 2, 0.7))
    loop.register(counter=counter)

    def score(part: Any) -> dict[str, Tensor]:
        outputs = model(part[0])
        return {
            "loss": cross_entropy(outputs, part[1], reduction="none"),
            "right": (outputs.argmax(1) == part[1]).float(),
        }

    for batch in loop.batches(loader(), points(40, 1), score=score):
        with batch:
            counter.seen += batch.samples
            for inputs, target in batch:
                loop.backward(cross_entropy(model(inputs), target, reduction="none"))
            loop.clip_gradients(optimizer, 1.0)
            optimizer.step()
            average.update_parameters(model)
            scheduler.step()
    assert loop.result is not None
    assert loop.result.steps == 9
    assert counter.seen == loop.result.samples_seen
    assert set(loop.result.test) >= {"loss", "right"}


class TwoHeads(nn.Module):
    """A body, and a head for even and one for odd steps."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(2, 8), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        found: Tensor = self.heads[step % 2](self.body(inputs).tanh())
        return found


def phases(run_dir: Path) -> None:
    """The body is frozen, then trained, then frozen again; the head that is not in use must not decay."""
    torch.manual_seed(rank_seed())
    model = TwoHeads()
    loop = new_loop(run_dir)
    model, optimizer = loop.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))
    for batch in loop.batches(loader()):
        with batch:
            model.body.requires_grad_(3 <= batch.step < 6)
            for inputs, target in batch:
                loop.backward(cross_entropy(model(inputs, batch.step), target, reduction="none"))
            optimizer.step()
    assert loop.result is not None
    assert loop.result.steps == 9


def follow(train: Callable[..., Any], data: Any, run_dir: Path) -> None:
    """One of the examples' loops, from the same weights everywhere."""
    torch.manual_seed(0)
    loop = new_loop(run_dir)
    train(loop, data)
    assert loop.result is not None
    assert loop.result.steps == 9


LOOPS: dict[str, Callable[[Path], None]] = {
    "classify": classify,
    "phases": phases,
    "gan": partial(follow, train_gan, ring(SAMPLES)),
    "contrastive": partial(follow, train_contrastive, ring(SAMPLES)),
    "policy": partial(follow, train_policy, SAMPLES),
}
