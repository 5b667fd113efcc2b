"""What people do in a training script beside the usual, each in a few lines: another optimizer and schedule, a measure
that chooses the weights, an average of the weights, clipping by value, mixup, label smoothing, phases with frozen
parts.

    python examples/recipes.py

Each recipe is a function. All but the last, which trains twice, are a script for `dtrain train --script` as they are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from digits import make_model, read_digits
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel

from trainer import Callback, FitResult, Run, Trainer

SETTINGS: dict[str, Any] = {"epochs": 4, "batch_size_per_gpu": 32}


def train(settings: dict[str, Any] | None = None, model: nn.Module | None = None, **parts: Any) -> FitResult:
    """Train on digits with these settings and parts, in a folder that is removed."""
    torch.manual_seed(0)
    given = {} if "task" in parts else {"loss": nn.CrossEntropyLoss()}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model or make_model(), SETTINGS | (settings or {}), run_dir=folder, **given | parts)
        return trainer.fit(*read_digits())


def one_cycle() -> FitResult:
    """SGD with momentum, without weight decay of biases, and a cycle of the learning rate over the whole training."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        biases = [each for name, each in model.named_parameters() if name.endswith("bias")]
        weights = [each for name, each in model.named_parameters() if not name.endswith("bias")]
        groups = [{"params": weights, "weight_decay": 5e-4}, {"params": biases, "weight_decay": 0.0}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)

    def scheduler(optimizer: torch.optim.Optimizer, total_steps: int) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=0.2, total_steps=total_steps)

    return train(optimizer=optimizer, lr_scheduler=scheduler)


class F1:
    """The macro-averaged F1 score of a whole split. Those of torchmetrics are given as they are."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self.found: list[Tensor] = []
        self.wanted: list[Tensor] = []

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Take a batch."""
        self.found.append(outputs.argmax(1))
        self.wanted.append(target)

    def compute(self) -> float:
        """Return the score."""
        return float(f1_score(torch.cat(self.wanted), torch.cat(self.found), average="macro"))


def best_by_f1() -> FitResult:
    """The weights with the best F1 score on the validation split, and an end after two evaluations without a better."""
    return train({"monitor": "f1", "mode": "max", "early_stopping_patience": 2}, metrics={"f1": F1()})


class AveragedWeights(Callback):
    """An exponential average of the weights, which resumes with the training and is given to nodes that join."""

    def on_start(self, run: Run) -> None:
        """Make the average."""
        self.averaged = AveragedModel(run.model, avg_fn=lambda kept, new, _: 0.95 * kept + 0.05 * new)

    def on_step(self, run: Run) -> None:
        """Take the weights of a step into it."""
        self.averaged.update_parameters(run.model)
        run.log("distance to the average", self._distance(run.model))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return self.averaged.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what a checkpoint has kept."""
        self.averaged.load_state_dict(state)

    def _distance(self, model: nn.Module) -> float:
        pairs = zip(self.averaged.module.parameters(), model.parameters(), strict=True)
        with torch.no_grad():
            return float(sum((mine - theirs).square().sum() for mine, theirs in pairs)) ** 0.5


def averaged() -> tuple[FitResult, nn.Module]:
    """An average of the weights beside the training."""
    average = AveragedWeights()
    return train(callbacks=[average]), average.averaged.module


def clipped_by_value() -> FitResult:
    """Each element of the gradient is clipped, instead of its norm."""
    return train({"clip_norm": None, "clip_value": 0.05})


class Mixup:
    """Images are mixed with others of their micro-batch, and so are their losses. Random numbers belong to the
    micro-batch, so the training is the same at any number of nodes."""

    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return one loss per image (n,)."""
        images, digits = batch
        if not model.training:
            return nn.functional.cross_entropy(model(images), digits, reduction="none")
        share, other = float(torch.rand(())), torch.randperm(len(images))
        outputs = model(share * images + (1 - share) * images[other])
        losses = [nn.functional.cross_entropy(outputs, each, reduction="none") for each in (digits, digits[other])]
        return share * losses[0] + (1 - share) * losses[1]


def mixup() -> FitResult:
    """Mixed images in training, plain ones in the evaluation."""
    return train(task=Mixup())


def smoothed() -> FitResult:
    """Smoothed labels are an argument of torch's loss."""
    return train(loss=nn.CrossEntropyLoss(label_smoothing=0.1))


def phases() -> FitResult:
    """The last layer first, then all of them, more slowly: each phase is a training."""
    model = make_model()
    for parameter in model[:-1].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    train({"epochs": 2}, model)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return train({"epochs": 2, "learning_rate": 1e-3}, model)


RECIPES: tuple[Callable[[], FitResult], ...] = (one_cycle, best_by_f1, clipped_by_value, mixup, smoothed, phases)


def main() -> None:
    """Run all recipes, and print the loss of each on the test split."""
    for recipe in RECIPES:
        print(f"{recipe.__name__}: test loss {recipe().test['loss']:.3f}")
    result, average = averaged()
    images, digits = read_digits()[2][:]
    right = np.mean((average(images).argmax(1) == digits).numpy())
    print(f"averaged: test loss {result.test['loss']:.3f}; the averaged weights are right about {right:.1%}")


if __name__ == "__main__":
    main()
