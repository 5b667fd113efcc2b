"""``training.compile``: the model through `torch.compile`, or a clear word on why that cannot be.

What is compiled is a second face of the model, which training steps call. The model itself stays as it is: names in
checkpoints, what is saved, evaluation with its other batch sizes, and gradients, which arrive at the same parameters.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable

import torch
from torch import nn

from trainer.errors import ConfigError

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


def compiled(module: nn.Module, mode: str, device: torch.device) -> nn.Module:
    """Return the module that training steps call, compiled unless ``mode`` is ``off``. Raise `ConfigError` if the
    machine cannot compile it."""
    if mode == "off":
        return module
    why = obstacle(mode, device.type, _has)
    if why is not None:
        raise ConfigError(why)
    return torch.compile(module, mode=mode)  # type: ignore[return-value]  # it is one, its stubs say a callable


def _has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None if name == "triton" else shutil.which(name) is not None
