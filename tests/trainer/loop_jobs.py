"""Loops of a caller's own: one optimizer with a schedule and an average of weights, a GAN, a contrastive loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fit_jobs import QUIET, SETTINGS, Shaken, network, points
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from trainer import Loop

CONFIG = {name: value for name, value in SETTINGS.items() if name != "batch_size_per_gpu"}


def loader() -> DataLoader[Any]:
    return DataLoader(Shaken(), batch_size=SETTINGS["batch_size_per_gpu"], shuffle=True)


def rank_seed() -> int:
    """Ranks begin with different weights: those of rank 0 count."""
    return int(os.environ.get("RANK", "0"))


def new_loop(run_dir: Path, **given: Any) -> Loop:
    return Loop(CONFIG, run_dir=run_dir, tracking=QUIET, progress=False, **given)


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


def gan(run_dir: Path) -> None:
    """Two optimizers, of which the first steps twice in a batch."""
    torch.manual_seed(rank_seed())
    generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
    g_opt = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
    d_opt = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
    loop = new_loop(run_dir)
    generator, critic, g_opt, d_opt = loop.setup(generator, critic, g_opt, d_opt)

    def judged(given: Tensor, real: bool) -> Tensor:
        found = critic(given)
        return binary_cross_entropy_with_logits(found, torch.full_like(found, float(real)), reduction="none")

    for batch in loop.batches(loader()):
        with batch:
            for _ in range(2):
                for inputs, _ in batch:
                    made = generator(torch.randn_like(inputs)).detach()
                    loop.backward(judged(inputs, True) + judged(made, False))
                d_opt.step()
            for inputs, _ in batch:
                loop.backward(judged(generator(torch.randn_like(inputs)), True))
            g_opt.step()
            loop.log("critic", next(critic.parameters()).detach().abs().sum())


def contrast(run_dir: Path) -> None:
    """A loss of each row against the rows of all ranks."""
    model = network(rank_seed())
    loop = new_loop(run_dir)
    model, optimizer = loop.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for batch in loop.batches(loader()):
        with batch:
            mine = [normalize(model(inputs)) for inputs, _ in batch]
            everything, own = loop.gather(mine), loop.own_rows()
            assert len(everything) == batch.samples
            shifted = normalize(everything + 0.1 * everything.roll(1, 1))
            loop.backward(cross_entropy(torch.cat(mine) @ shifted.T / 0.2, own, reduction="none"))
            optimizer.step()


LOOPS: dict[str, Callable[[Path], None]] = {"classify": classify, "gan": gan, "contrast": contrast}
