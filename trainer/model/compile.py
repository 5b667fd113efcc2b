"""``training.compile``: the model and its loss through `torch.compile`, or a clear word on why that cannot be.

What is compiled is a second face of the model, which training steps call. The model itself stays as it is: names in
checkpoints, what is saved, evaluation with its other batch sizes, and gradients, which arrive at the same parameters.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.model.task import Task

_T = TypeVar("_T")
_COMPILER = "g++"
"""The compiler that torch looks for if CXX names none."""


def obstacle(mode: str, device: str, has: Callable[[str], bool]) -> str | None:
    """Return why a model cannot be compiled in this mode on this kind of device, or None. ``has`` says whether there is
    a C++ compiler of this name, or ``triton``."""
    where = f"training.compile = {mode!r}"
    if device == "cpu" and mode == "reduce-overhead":
        return f"{where} means CUDA graphs, which need a GPU; use 'default' or 'off' on the CPU"
    if device == "cpu" and not has(compiler := os.environ.get("CXX") or _COMPILER):
        return (
            f"{where} needs a C++ compiler ({compiler}) on every node: install one (Debian: apt-get "
            "install g++), name it in the environment variable CXX, or set training.compile = 'off'"
        )
    if device == "cuda" and not has("triton"):
        return f"{where} needs the package triton on every node: pip install triton, or set training.compile = 'off'"
    return None


def compiled(work: Callable[..., _T], mode: str, device: torch.device) -> Callable[..., _T]:
    """Return a module, or a function of one, as training steps call it: compiled unless ``mode`` is ``off``. Raise
    `ConfigError` if the machine cannot compile it."""
    if mode == "off":
        return work
    why = obstacle(mode, device.type, _has)
    if why is not None:
        raise ConfigError(why)
    return torch.compile(work, mode=mode)


def compiled_loss(task: Task, module: nn.Module, mode: str, device: torch.device) -> Callable[[Any], Tensor]:
    """Return the losses of a batch as a function of it, compiled together with the model: otherwise what a loss does
    with the outputs would run one operation after the other. See `compiled`."""

    def losses(data: Any) -> Tensor:
        return task.loss(module, data)

    return compiled(losses, mode, device)


def _has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None if name == "triton" else shutil.which(name) is not None
