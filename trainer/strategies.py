"""What sums gradients and holds the model: the strategies of a training, what goes with each, and what each needs.

Only pure decisions on names and settings belong here, without torch: the orchestrator refuses with them before a node
is asked for. The class that makes the steps of each is named
in `trainer.engine.step.STRATEGIES`, and what sums or holds parameters is in `trainer.parallel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from trainer.errors import ConfigError
from trainer.runtime.packages import installed_version, is_installed

Strategy = Literal["ddp", "fsdp", "hsdp", "horovod", "deepspeed"]
SHARDED = ("fsdp", "hsdp")
"""The strategies with which a rank holds rows of the parameters, and not all of them."""
SHARDED_NEED = (2, 13)
"""The first version of torch that they work with."""
PLAIN: Mapping[str, Any] = {"strategy": "ddp", "gather_precision": "fp32", "cpu_offload": False, "zero_stage": 1}
"""The settings of a training as any process can try it, without the parts that belong to another strategy."""
PACKAGES = {"horovod": "horovod.torch", "deepspeed": "deepspeed"}
"""The module that a strategy needs beside torch."""
REMEDIES = {
    "horovod": "it is built for the installed torch, on all nodes: tools/frameworks/build_horovod.sh PYTHON",
    "deepspeed": "pip install 'deepspeed>=0.19,<0.20', on all nodes",
}
"""How that module is installed."""


def can_record(config: Any) -> bool:
    """Return whether the steps of a training with these settings can be recorded as CUDA graphs. Pure."""
    return config.strategy == "ddp" and config.compile != "reduce-overhead" and not config.activation_checkpointing


def explain_strategy(config: Any) -> str:
    """Return why a training cannot have these settings with its ``strategy``, and the remedy; "" if it can. ``config``:
    a `trainer.config.DistributedTrainingConfig`, which calls this as it is made. Pure."""
    if config.cuda_graphs == "on" and not can_record(config):
        return (
            "training.cuda_graphs = 'on' needs training.strategy = 'ddp', without training.activation_checkpointing "
            "and without training.compile = 'reduce-overhead', which makes graphs of its own: change these, or set "
            "training.cuda_graphs = 'auto'"
        )
    if config.strategy != "deepspeed" and config.zero_stage != 1:
        return f"training.zero_stage = {config.zero_stage} is DeepSpeed's: set training.strategy = 'deepspeed'"
    asked = f"training.strategy = {config.strategy!r}"
    if config.strategy in SHARDED:
        return _explain_exact(config, asked)
    if (given := config.gather_precision) != "fp32":
        return f"training.gather_precision = {given!r} needs sharded parameters: set training.strategy to fsdp or hsdp"
    if config.strategy == "deepspeed":
        return _explain_exact(config, asked) or _explain_encryption(config, asked)
    if config.cpu_offload:
        return (
            "training.cpu_offload = True needs sharded parameters: set training.strategy to fsdp or hsdp, or to "
            "deepspeed"
        )
    if config.communication == "topk" and config.precision == "fp16":
        return (
            "training.communication = 'topk' cannot be combined with training.precision = 'fp16', whose loss scale "
            "changes while entries are held back: use precision 'bf16', or communication 'fp16'"
        )
    if config.strategy != "horovod":
        return ""
    if config.communication not in ("allreduce", "fp16"):
        return (
            f"{asked} uses Horovod's all-reduce and does not support training.communication = "
            f"{config.communication!r}: set it to 'allreduce', or to 'fp16' for half the bytes"
        )
    return _explain_encryption(config, asked)


def _explain_exact(config: Any, asked: str) -> str:
    if config.compile != "off":
        return f"{asked} cannot be combined with training.compile = {config.compile!r}: set training.compile = 'off'"
    if config.communication != "allreduce":
        return (
            f"{asked} sums gradients exactly and does not support training.communication = {config.communication!r}: "
            "set it to 'allreduce'"
        )
    if config.precision == "fp16":
        return f"{asked} has no loss scaling here, which training.precision = 'fp16' needs: set it to 'bf16'"
    return ""


def _explain_encryption(config: Any, asked: str) -> str:
    if config.tls is not None or config.encryption == "required":
        name = "training.tls is set" if config.tls is not None else "training.encryption = 'required'"
        return (
            f"{asked} sends gradients unencrypted, and {name}: train with strategy 'ddp', or in a private network "
            "without that setting"
        )
    return ""


def require_package(strategy: str) -> None:
    """Raise `ConfigError` if this process's Python lacks what a strategy needs: a package, or a version of torch.
    Nothing is imported."""
    if strategy in SHARDED and (found := installed_version("torch")) < SHARDED_NEED:
        least, here = (".".join(map(str, version)) for version in (SHARDED_NEED, found))
        raise ConfigError(
            f"training.strategy = {strategy!r} needs torch {least} or later, whose FSDP2 also sums what some ranks do "
            f"not use, and {here} is installed: install a later one on all nodes, or set training.strategy = 'ddp'"
        )
    name = PACKAGES.get(strategy)
    if name is not None and not is_installed(name):
        raise ConfigError(
            f"training.strategy = {strategy!r} needs the Python package {name.partition('.')[0]!r}, which is not "
            f"installed: {REMEDIES[strategy]}; or set training.strategy = 'ddp'"
        )


ENGINES: Mapping[str, Strategy] = {
    "pytorch-ddp": "ddp",
    "pytorch-fsdp": "fsdp",
    "horovod": "horovod",
    "deepspeed": "deepspeed",
}
"""The strategy that each engine's name stands for, where a backend is asked for."""
_LOOPS = {"ray": "RayTrainer", "tensorflow": "TensorFlowDistributedTrainer"}
"""The names in the package `trainer` of engines that are more than a strategy."""
COMMUNICATION_BACKENDS = ("auto", "gloo", "nccl")


def settings_of_backend(name: str) -> dict[str, str]:
    """Return the fields of ``training`` that a ``--backend`` stands for: an engine, such as ``horovod``, is a strategy;
    ``gloo`` and ``nccl`` are what ranks communicate by. Pure. Raise `ConfigError` for a name that is neither."""
    if name in COMMUNICATION_BACKENDS:
        return {"backend": name}
    if name in ENGINES:
        return {"strategy": ENGINES[name]}
    if name in _LOOPS:
        raise ConfigError(f"{name!r} is not a strategy of this loop: train with trainer.{_LOOPS[name]} in a script")
    known = ", ".join([*ENGINES, *COMMUNICATION_BACKENDS])
    raise ConfigError(f"there is no backend {name!r}: choose one of {known}")


def settings_of_deepspeed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``training`` that a configuration of DeepSpeed's own stands for. Pure. Raise `ConfigError`,
    with the name, for what has no counterpart here."""
    known: dict[str, str] = {
        "train_micro_batch_size_per_gpu": "batch_size_per_gpu",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_clipping": "clip_norm",
    }
    found: dict[str, Any] = {"strategy": "deepspeed"}
    for name, value in config.items():
        if name in known:
            found[known[name]] = value
        elif name == "zero_optimization":
            found |= _settings_of_zero(value)
        elif name == "bf16":
            found["precision"] = "bf16" if value.get("enabled") else "fp32"
        else:
            raise ConfigError(f"DeepSpeed's {name!r} has no counterpart here: leave it out; known: {_KNOWN}")
    return found


_KNOWN = "zero_optimization, bf16, gradient_clipping, gradient_accumulation_steps and train_micro_batch_size_per_gpu"


def _settings_of_zero(zero: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in zero.items():
        if name == "stage" and value in (1, 2, 3):
            found["zero_stage"] = value
        elif name in ("offload_optimizer", "offload_param") and value.get("device") in ("cpu", "none"):
            found["cpu_offload"] = found.get("cpu_offload", False) or value["device"] == "cpu"
        else:
            raise ConfigError(
                f"DeepSpeed's zero_optimization.{name} = {value!r} has no counterpart here: known are stage (1, 2 or "
                "3), and offload_optimizer and offload_param to the device 'cpu'"
            )
    return found
