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
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.model.optimizers import OptimizerRecipe, ScheduledOptimizer, is_like
from trainer.runtime.nested import find_odd_part

_CORNER = 4
"""The size of a likeness's parameters in each dimension."""
_STEPS = 3
_MOST_STEPS = 20_000
"""The most steps for which a scheduler is tried."""
_NEAR = 1e-6
"""The most by which two updates that are to be equal may differ, of the largest of them: in float64."""
_OF_ADAMW = ("learning_rate", "weight_decay")
_OF_SCHEDULE = ("schedule", "warmup_steps", "min_lr_fraction", "lr_scaling", "lr_base_batch_size")


def try_optimizer(
    module: nn.Module,
    recipe: OptimizerRecipe,
    config: DistributedTrainingConfig,
    total_steps: int,
    is_validated: bool = True,
) -> OptimizerRecipe:
    """Return the recipe, with what its optimizer keeps. ``total_steps``: of the whole training; ``is_validated``:
    whether there is a validation split. Raise `ConfigError` for an optimizer or a scheduler that cannot be used with
    this model and these settings; what the caller's functions raise themselves comes as it is."""
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
    gradients = [
        {name: torch.randn(each.shape, generator=random).to(each.dtype) for name, each in corners.items()}
        for _ in range(_STEPS + 1)
    ]
    whole = _likeness(module, corners)
    made = ScheduledOptimizer(whole, recipe, config, total_steps)
    _refuse_other_goal(made, config, is_validated)
    _train(made, whole, gradients[:_STEPS])
    _require_plain(made)
    _require_whole_state(module, recipe, config, total_steps, made, whole, gradients[_STEPS])
    if config.is_sharded:
        _require_elementwise(module, replace(recipe, lr_scheduler=None), config, corners, gradients)
    recipe = replace(recipe, moments=_count_moments(made, module))
    for step in range(_STEPS + 1, min(total_steps, _MOST_STEPS)):
        try:
            made.advance()
        except Exception as error:
            raise ConfigError(
                f"the scheduler fails after {step} of {total_steps} steps ({type(error).__name__}: {error}): let its "
                "function have an argument total_steps, which it is given"
            ) from error
    return recipe


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


def _refuse_other_goal(made: ScheduledOptimizer, config: DistributedTrainingConfig, is_validated: bool) -> None:
    """Raise `ConfigError` for a schedule that follows evaluations, where there are none or its aim is another."""
    scheduler = made.scheduler
    if not isinstance(scheduler, ReduceLROnPlateau):
        return
    if not is_validated:
        raise ConfigError("ReduceLROnPlateau follows the validation split, and there is none: call fit(train, valid)")
    if scheduler.mode != config.mode:
        raise ConfigError(
            f"ReduceLROnPlateau(mode={scheduler.mode!r}) follows training.monitor = {config.monitor!r}, of which "
            f"training.mode = {config.mode!r} is the aim: give both the same mode"
        )


def _corner(parameter: Tensor, random: torch.Generator) -> Tensor:
    """Return numbers for a corner of a parameter, in float64, so that rounding hides nothing."""
    shape = [min(_CORNER, size) for size in parameter.shape]
    return torch.randn(shape, generator=random, dtype=torch.float64)


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


def _require_whole_state(
    module: nn.Module,
    recipe: OptimizerRecipe,
    config: DistributedTrainingConfig,
    total_steps: int,
    made: ScheduledOptimizer,
    whole: nn.Module,
    gradients: dict[str, Tensor],
) -> None:
    """Raise `ConfigError` unless another optimizer that has taken over the state does the same next step."""
    before = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
    other = _likeness(module, before)
    again = ScheduledOptimizer(other, recipe, config, total_steps)
    again.load(copy.deepcopy(made.tensors()), copy.deepcopy(made.options()))
    for one, its in ((made, whole), (again, other)):
        _train(one, its, [gradients])
    if odd := _find_other_update(dict(whole.named_parameters()), dict(other.named_parameters()), before):
        raise ConfigError(
            f"{made.kind} updates {odd} otherwise once its state_dict() was saved and loaded: it keeps something that "
            "is neither in the state of parameters nor in the groups, which checkpoints and nodes that join would lack"
        )


def _require_elementwise(
    module: nn.Module,
    recipe: OptimizerRecipe,
    config: DistributedTrainingConfig,
    corners: Mapping[str, Tensor],
    gradients: list[dict[str, Tensor]],
) -> None:
    """Raise `ConfigError` unless rows that are updated by themselves become what they become in whole parameters."""
    trained: list[tuple[ScheduledOptimizer, dict[str, nn.Parameter]]] = []
    for cut in (_all_rows, _first_rows, _last_rows):
        part = _likeness(module, {name: cut(each) for name, each in corners.items()})
        made = ScheduledOptimizer(part, recipe, config, 0)
        _train(made, part, [{name: cut(each) for name, each in of_step.items()} for of_step in gradients])
        trained.append((made, dict(part.named_parameters())))
    (whole, parameters), *halves = trained
    for made, _ in halves:
        if made.options()["param_groups"] != whole.options()["param_groups"]:
            raise ConfigError(
                _explain(made, config, "has other groups, or other options of them, when it has only rows")
            )
        for place, kept in made.tensors().items():
            parameter = made.parameters[place]
            for name, value in kept.items():
                if not isinstance(value, Tensor) or not value.dim():
                    if value != whole.tensors()[place].get(name):
                        raise ConfigError(_explain(made, config, f"keeps another {name!r} when it has only rows"))
                elif value.shape != parameter.shape or value.dtype != parameter.dtype:
                    raise ConfigError(
                        _explain(made, config, f"keeps {name!r} of another shape or type than the parameter")
                    )
                if name in ("weights", "best"):
                    raise ConfigError(_explain(made, config, f"calls a state {name!r}, which a checkpoint has already"))
    rows = {name: torch.cat([half[name] for _, half in halves]) for name in parameters}
    if odd := _find_other_update(parameters, rows, corners):
        raise ConfigError(_explain(whole, config, f"updates rows of {odd} otherwise when it has only those"))


def _find_other_update(one: Mapping[str, Tensor], other: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> str:
    """Return the first parameter that was updated otherwise in one than in the other, "" where there is none."""
    for name, start in before.items():
        if not start.numel():
            continue
        mine, theirs = (each[name].detach() - start for each in (one, other))
        if float((mine - theirs).abs().max()) > _NEAR * float(mine.abs().max()):
            return name
    return ""


def _explain(made: ScheduledOptimizer, config: DistributedTrainingConfig, what: str) -> str:
    return (
        f"training.strategy = {config.strategy!r} leaves each rank rows of every parameter, and {made.kind} {what}: "
        "use an optimizer that works element by element (SGD, Adam, AdamW, RMSprop), or set training.strategy = 'ddp'"
    )


def _all_rows(tensor: Tensor) -> Tensor:
    return tensor


def _first_rows(tensor: Tensor) -> Tensor:
    return tensor[: (len(tensor) + 1) // 2] if tensor.dim() else tensor


def _last_rows(tensor: Tensor) -> Tensor:
    return tensor[(len(tensor) + 1) // 2 :] if tensor.dim() else tensor
