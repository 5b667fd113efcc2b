"""What a caller's optimizer and scheduler are held against before anything is trained: tried on a small likeness of the
model, whose parameters are corners of the real ones.

Refused by name are settings that would have no effect, optimizers that need a closure or whose step fails, state that a
checkpoint could not keep, and where ranks hold rows, updates of a row that depend on other rows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.model.optimizers import OptimizerRecipe, ScheduledOptimizer, is_like
from trainer.runtime.nested import find_odd_part

_CORNER = 4
"""The size of a likeness's parameters in each dimension."""
_STEPS = 3
_TOTAL = 100
_OF_ADAMW = ("learning_rate", "weight_decay")
_OF_SCHEDULE = ("schedule", "warmup_steps", "min_lr_fraction", "lr_scaling", "lr_base_batch_size")


def try_optimizer(module: nn.Module, recipe: OptimizerRecipe, config: DistributedTrainingConfig) -> OptimizerRecipe:
    """Return the recipe, with what its optimizer keeps. Raise `ConfigError` for an optimizer or a scheduler that cannot
    be used with this model and these settings; what the caller's functions raise themselves comes as it is."""
    if recipe.is_usual:
        return recipe
    _refuse_idle_settings(recipe, config)
    if config.strategy == "deepspeed":
        raise ConfigError(
            "training.strategy = 'deepspeed' trains with AdamW and the schedule of the settings: leave optimizer and "
            "lr_scheduler out, or set training.strategy to 'ddp', 'fsdp' or 'hsdp'"
        )
    random = torch.Generator().manual_seed(0)
    corners = {name: _corner(parameter, random) for name, parameter in module.named_parameters()}
    whole = _likeness(module, corners)
    made = ScheduledOptimizer(whole, recipe, config, _TOTAL)
    gradients = [
        {name: torch.randn(each.shape, generator=random).to(each.dtype) for name, each in corners.items()}
        for _ in range(_STEPS)
    ]
    _train(made, whole, gradients)
    _require_plain(made)
    if config.is_sharded:
        _require_elementwise(module, recipe, config, corners, whole, gradients)
    return replace(recipe, moments=_count_moments(made, module))


def _count_moments(made: ScheduledOptimizer, module: nn.Module) -> float:
    """Return how many numbers an optimizer keeps for each that is trained. What it keeps in another shape, such as sums
    of rows, is taken for small."""
    tensors, kept, trained = made.tensors(), 0, 0
    for place, (real, corner) in enumerate(zip(module.parameters(), made.parameters, strict=True)):
        if real.requires_grad:
            trained += real.numel()
            kept += real.numel() * sum(is_like(value, corner) for value in tensors.get(place, {}).values())
    return kept / max(1, trained)


def _refuse_idle_settings(recipe: OptimizerRecipe, config: DistributedTrainingConfig) -> None:
    usual = DistributedTrainingConfig()
    idle = [
        (names, part)
        for names, part, given in (
            (_OF_ADAMW, "optimizer", recipe.optimizer),
            (_OF_SCHEDULE, "lr_scheduler", recipe.lr_scheduler),
        )
        if given is not None
    ]
    for names, part in idle:
        for name in names:
            if (value := getattr(config, name)) != getattr(usual, name):
                raise ConfigError(
                    f"training.{name} = {value!r} has no effect with an {part} of your own: leave it out (or set it to "
                    f"{getattr(usual, name)!r}), and give the {part} its own"
                )


def _corner(parameter: Tensor, random: torch.Generator) -> Tensor:
    shape = [min(_CORNER, size) for size in parameter.shape]
    return torch.randn(shape, generator=random).to(parameter.dtype)


def _likeness(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a module with these parameters. Raise `ConfigError` where it cannot be copied."""
    known: dict[int, Any] = {
        id(parameter): nn.Parameter(values[name].clone(), requires_grad=parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }
    known |= {id(buffer): buffer for buffer in module.buffers()}
    try:
        return copy.deepcopy(module, known)
    except Exception as error:
        raise ConfigError(
            f"an optimizer of your own is tried on a copy of the model first, and {type(module).__name__} cannot be "
            f"copied ({type(error).__name__}: {error}): make copy.deepcopy(model) work"
        ) from error


def _train(made: ScheduledOptimizer, module: nn.Module, gradients: list[dict[str, Tensor]]) -> None:
    """Take steps with these gradients. Raise `ConfigError` for an optimizer whose step fails."""
    for of_step in gradients:
        for name, parameter in module.named_parameters():
            parameter.grad = of_step[name].clone() if parameter.requires_grad else None
        made.set_rate(made.config.learning_rate)
        try:
            made.optimizer.step()
        except Exception as error:
            raise ConfigError(
                f"{made.kind}.step() fails ({type(error).__name__}: {error}): it is called without a closure, after "
                "the gradients of a step are summed. Optimizers that compute gradients themselves (LBFGS, SAM) cannot "
                "be used"
            ) from error
        made.advance()


def _require_plain(made: ScheduledOptimizer) -> None:
    """Raise `ConfigError` for a state that a checkpoint could not keep, or that is not where others look for it."""
    if extra := sorted(set(made.optimizer.state_dict()) - {"state", "param_groups"}):
        raise ConfigError(
            f"{made.kind}.state_dict() has {', '.join(map(repr, extra))} beside state and param_groups, which would "
            "not be passed to nodes that join: keep it in the state of parameters, or in the groups"
        )
    for what, value in (("the optimizer", made.tensors()), ("the optimizer or the scheduler", made.options())):
        if (odd := find_odd_part(value)) is not None:
            raise ConfigError(
                f"the state of {what} has a {type(odd).__name__}, and a checkpoint holds tensors and plain values only"
            )


def _require_elementwise(
    module: nn.Module,
    recipe: OptimizerRecipe,
    config: DistributedTrainingConfig,
    corners: Mapping[str, Tensor],
    whole: nn.Module,
    gradients: list[dict[str, Tensor]],
) -> None:
    """Raise `ConfigError` unless rows that are updated by themselves become what they become in whole parameters."""
    halves = []
    for cut in (_first_rows, _last_rows):
        part = _likeness(module, {name: cut(each) for name, each in corners.items()})
        made = ScheduledOptimizer(part, recipe, config, _TOTAL)
        _train(made, part, [{name: cut(each) for name, each in of_step.items()} for of_step in gradients])
        halves.append(dict(part.named_parameters()))
        for place, kept in made.tensors().items():
            for name, value in kept.items():
                shape = made.parameters[place].shape
                if isinstance(value, Tensor) and value.dim() and value.shape != shape:
                    raise ConfigError(_explain(made, config, f"keeps {name!r} of another shape than the parameter"))
                if name in ("weights", "best"):
                    raise ConfigError(_explain(made, config, f"calls a state {name!r}, which a checkpoint has already"))
    for name, parameter in whole.named_parameters():
        rows = torch.cat([half[name] for half in halves])
        if not torch.allclose(rows, parameter, rtol=1e-4, atol=1e-6):
            raise ConfigError(_explain(made, config, f"updates rows of {name} otherwise when it has only those"))


def _explain(made: ScheduledOptimizer, config: DistributedTrainingConfig, what: str) -> str:
    return (
        f"training.strategy = {config.strategy!r} leaves each rank rows of every parameter, and {made.kind} {what}: "
        "use an optimizer that works element by element (SGD, Adam, AdamW, RMSprop), or set training.strategy = 'ddp'"
    )


def _first_rows(tensor: Tensor) -> Tensor:
    return tensor[: (len(tensor) + 1) // 2] if tensor.dim() else tensor


def _last_rows(tensor: Tensor) -> Tensor:
    return tensor[(len(tensor) + 1) // 2 :] if tensor.dim() else tensor
