"""Models and losses of a user, some of them bad; ``user_parts:name``."""

from __future__ import annotations

import gc
import math
import os
import resource
import sys
import time

import psutil
import torch
from torch import Tensor, nn

from trainer.model.stock import tcn
from trainer.spec import DataSpec


def raises_on_rank_1(spec: DataSpec, outputs: int) -> nn.Module:
    if os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 has no weights")
    return linear(spec, outputs)


def linear(spec: DataSpec, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(spec.window * len(spec.features), outputs))


def slow_to_make(spec: DataSpec, outputs: int) -> nn.Module:
    time.sleep(4)
    return linear(spec, outputs)


class Slow(nn.Module):
    """Takes its time, so that a signal comes in the middle."""

    def __init__(self, spec: DataSpec, outputs: int, seconds: float = 0.05, hurry: str = "") -> None:
        """``hurry``: once there is a file of this path, it takes no time any more."""
        super().__init__()
        self.inner, self.seconds, self.hurry = linear(spec, outputs), seconds, hurry

    def forward(self, windows: Tensor) -> Tensor:
        if not os.path.exists(self.hurry):
            time.sleep(self.seconds)
        return self.inner(windows)


def paced(spec: DataSpec, outputs: int, seconds: float = 0.04, hurry: str = "") -> nn.Module:
    """The stock model, slow enough to be disturbed while it trains; dropout is on."""
    model = Slow(spec, outputs, seconds, hurry)
    model.inner = tcn(spec, outputs, channels=8)
    return model


MARK = torch.tensor([0.1 + 0.017 * number for number in range(16)])
"""Numbers that are nowhere else."""


class _Mark(torch.autograd.Function):
    """Changes nothing on the way forward; on the way back, the gradient of its second argument is `MARK`."""

    @staticmethod
    def forward(context: object, values: Tensor, mark: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(context: object, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, MARK.clone()


class Marked(nn.Module):
    """A model with a parameter whose gradient can be recognised on the wire."""

    def __init__(self, spec: DataSpec, outputs: int) -> None:
        super().__init__()
        self.inner, self.mark = linear(spec, outputs), nn.Parameter(torch.zeros(16))

    def forward(self, windows: Tensor) -> Tensor:
        return _Mark.apply(self.inner(windows), self.mark)


def marked(spec: DataSpec, outputs: int) -> nn.Module:
    return Marked(spec, outputs)


class Blocks(nn.Module):
    """On rank 1, with three micro-batches in a step, it never comes out of the fourth step."""

    def __init__(self, spec: DataSpec, outputs: int) -> None:
        super().__init__()
        self.inner, self.left = linear(spec, outputs), 1 + 3 * 3  # one is to see whether the model works

    def forward(self, windows: Tensor) -> Tensor:
        self.left -= 1
        while os.environ["RANK"] == "1" and self.left < 0:
            time.sleep(0.1)  # here it stands
        return self.inner(windows)


class PartlyUsed(nn.Module):
    """Has a layer that no output depends on."""

    def __init__(self, spec: DataSpec, outputs: int) -> None:
        super().__init__()
        self.inner, self.unused = linear(spec, outputs), nn.Linear(3, 3)

    def forward(self, windows: Tensor) -> Tensor:
        return self.inner(windows)


class NanAfterAWhile(nn.Module):
    outputs = 1

    def __init__(self, spec: DataSpec, calls: int = 20) -> None:
        super().__init__()
        self.left = calls

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        self.left -= torch.is_grad_enabled()
        return (outputs[:, 0] - target) ** 2 * (math.nan if self.left < 0 else 1.0)


class Hungry(nn.Module):
    """Keeps 8 MiB of activations for each sample, several times over, in no block that could be computed again.
    Before its first pass, the process gets a limit on its memory: little more than it has."""

    def __init__(self, spec: DataSpec, outputs: int, room_mb: int = 0) -> None:
        super().__init__()
        self.inner, self.room_mb = linear(spec, outputs), room_mb

    def forward(self, windows: Tensor) -> Tensor:
        if self.training and self.room_mb:
            held = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (held + (self.room_mb << 20), resource.RLIM_INFINITY))
            self.room_mb = 0
        outputs = self.inner(windows)
        wide = outputs[:, :1].expand(len(outputs), 2 << 20)
        return outputs + wide.sin().cos().mean(1, keepdim=True)


class Counting(nn.Module):
    """Writes the number of Python's allocated blocks, about one for each object, once in a while: the smallest of its
    passes since the last time, since other threads hold some for a moment."""

    def __init__(self, spec: DataSpec, outputs: int, path: str = "", every: int = 100) -> None:
        super().__init__()
        self.inner, self.path, self.every, self.passes = linear(spec, outputs), path, every, 0
        self.least = 0

    def forward(self, windows: Tensor) -> Tensor:
        if self.training and self.path:
            self.passes += 1
            if self.passes % 10 == 0:
                gc.collect()
                now = sys.getallocatedblocks()
                self.least = min(now, self.least or now)
            if self.passes % self.every == 0:
                with open(self.path, "a") as file:
                    file.write(f"{self.least}\n")
                self.least = 0
        return self.inner(windows)
