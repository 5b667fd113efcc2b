"""What sums gradients and holds the model: the strategies of a training, what goes with each, and what each needs.

Only pure decisions on names and settings belong here, without torch: the orchestrator refuses with them before a node
is asked for. The strategies themselves are in `trainer.parallel`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Literal

from trainer.errors import ConfigError

Strategy = Literal["ddp", "fsdp", "hsdp", "horovod"]
SHARDED = ("fsdp", "hsdp")
"""The strategies with which a rank holds rows of the parameters, and not all of them."""
PLAIN: Mapping[str, Any] = {"strategy": "ddp", "gather_precision": "fp32", "cpu_offload": False}
"""The settings of a training as any process can try it, without the parts that belong to another strategy."""
PACKAGES = {"horovod": "horovod.torch"}
"""The module that a strategy needs beside torch."""
REMEDIES = {"horovod": "build Horovod 0.28.1 with PyTorch on all nodes, as docs/frameworks-fit.md says"}
"""How that module is installed."""


def explain_strategy(config: Any) -> str:
    """Return why a training cannot have these settings with its ``strategy``, and the remedy; "" if it can. ``config``:
    a `trainer.config.DistributedTrainingConfig`, which calls this as it is made. Pure."""
    if config.strategy in SHARDED:
        return _explain_sharded(config)
    for name, usual in (("gather_precision", "fp32"), ("cpu_offload", False)):
        if (given := getattr(config, name)) != usual:
            return f"training.{name} = {given!r} needs sharded parameters: set training.strategy to fsdp or hsdp"
    return _explain_horovod(config) if config.strategy == "horovod" else ""


def _explain_sharded(config: Any) -> str:
    asked = f"training.strategy = {config.strategy!r}"
    if config.compile != "off":
        return f"{asked} does not go with training.compile = {config.compile!r}: set training.compile = 'off'"
    if config.communication not in ("allreduce", "auto"):
        return (
            f"{asked} sums gradients exactly, and not as training.communication = {config.communication!r} asks: set "
            "it to 'allreduce'"
        )
    if config.precision == "fp16":
        return f"{asked} has no loss scaling, which training.precision = 'fp16' needs: set it to 'bf16'"
    return ""


def _explain_horovod(config: Any) -> str:
    asked = f"training.strategy = {config.strategy!r}"
    if config.communication not in ("allreduce", "fp16"):
        return (
            f"{asked} sums gradients by Horovod's all-reduce, and not as training.communication = "
            f"{config.communication!r} asks: set it to 'allreduce', or to 'fp16' for half the bytes"
        )
    if config.tls is not None or config.encryption == "required":
        name = "training.tls is set" if config.tls is not None else "training.encryption = 'required'"
        return (
            f"{asked} sends gradients unencrypted, and {name}: train with strategy 'ddp', or in a private network "
            "without that setting"
        )
    return ""


def require_package(strategy: str) -> None:
    """Raise `ConfigError` if this process's Python lacks the package that a strategy needs. Nothing is imported."""
    name = PACKAGES.get(strategy)
    if name is None:
        return
    try:
        is_there = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        is_there = False
    if not is_there:
        raise ConfigError(
            f"training.strategy = {strategy!r} needs the Python package {name.partition('.')[0]!r}, which is not "
            f"installed: {REMEDIES[strategy]}; or set training.strategy = 'ddp'"
        )


ENGINES: Mapping[str, Strategy] = {"pytorch-ddp": "ddp", "pytorch-fsdp": "fsdp", "horovod": "horovod"}
"""The strategy that each engine's name stands for, where a backend is asked for."""
COMMUNICATION_BACKENDS = ("auto", "gloo", "nccl")


def settings_of_backend(name: str) -> dict[str, str]:
    """Return the fields of ``training`` that a ``--backend`` stands for: an engine, such as ``horovod``, is a strategy;
    ``gloo`` and ``nccl`` are what ranks communicate by. Pure. Raise `ConfigError` for a name that is neither."""
    if name in COMMUNICATION_BACKENDS:
        return {"backend": name}
    if name in ENGINES:
        return {"strategy": ENGINES[name]}
    known = ", ".join([*ENGINES, *COMMUNICATION_BACKENDS])
    raise ConfigError(f"there is no backend {name!r}: choose one of {known}")
