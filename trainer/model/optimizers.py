"""The optimizer of a step and its learning rates: made, set for each step, moved on once per commit, saved.

Without functions of the caller's it is AdamW by the settings, with their schedule. What of a caller's optimizer is
refused, and why, is `trainer.model.optimizer_check`.

A state is saved by the place of each parameter in ``module.parameters()``, however the optimizer groups them: so an
undivided training, ranks that hold rows, and DeepSpeed read the same checkpoint.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from trainer.config import SCRIPT, ConfigError, DistributedTrainingConfig, FactoryConfig, OptimizerConfig
from trainer.model.allowed_factories import TORCH_MODULES, is_module_allowed, modules_of_settings
from trainer.model.factories import find_factory
from trainer.performance.memory import MOMENTS
from trainer.runtime.nested import map_leaves

TOTAL_STEPS = "$total_steps"
"""An argument of a scheduler in ``job.json`` that stands for the number of all steps."""


@dataclass(frozen=True, slots=True)
class OptimizerRecipe:
    """How the optimizer of a training and its schedule are made: again for each division of the model."""

    optimizer: Callable[[nn.Module], Optimizer] | None = None
    """Makes the optimizer of a model; None: AdamW by the settings."""
    lr_scheduler: Callable[..., Any] | None = None
    """Makes the schedule of an optimizer, given ``total_steps`` if it has an argument of that name: a scheduler of
    torch, or a function from the step (from 0) to a factor. None: the schedule of the settings."""

    moments: float = MOMENTS
    """How many numbers the optimizer keeps for each that is trained."""

    @property
    def is_usual(self) -> bool:
        """Whether both are those of the settings."""
        return self.optimizer is None and self.lr_scheduler is None


USUAL = OptimizerRecipe()


def recipe_for(
    optimizer: OptimizerConfig | None,
    lr_scheduler: FactoryConfig | None,
    given: OptimizerRecipe = USUAL,
    modules: tuple[str, ...] | None = None,
) -> OptimizerRecipe:
    """Return the recipe of a job, whose parts are functions that a script has ``given``, or those that the job names.
    ``modules``: those that may be imported; None: those of the settings. Raise `ConfigError` where a name leads to
    nothing, or is given for what the script makes itself."""
    named: Any = (("optimizer", optimizer, _make_by_name), ("lr_scheduler", lr_scheduler, _schedule_by_name))
    made: dict[str, Any] = {}
    for part, config, make in named:
        made[part] = getattr(given, part)
        if made[part] is not None:
            if config is None or config.factory != SCRIPT or config.args.keys() != {"class"}:
                raise ConfigError(f"the script makes its {part} itself: leave {part} out of what is set for its job")
        elif config is not None:
            allowed = modules_of_settings() if modules is None else modules
            found = find_factory(part, config.factory, {}, (*allowed, *TORCH_MODULES))
            kinds = Optimizer if part == "optimizer" else LRScheduler
            if not is_module_allowed(found.__module__, allowed) and not (
                inspect.isclass(found) and issubclass(found, kinds)
            ):
                raise ConfigError(f"{part}.factory = {config.factory!r} is no {kinds.__name__} of torch")
            made[part] = partial(make, found, config)
    return OptimizerRecipe(**made)


def _make_by_name(factory: Callable[..., Any], config: OptimizerConfig, module: nn.Module) -> Any:
    """Return an optimizer: a class of optimizers gets the groups that the job describes, another function the model."""
    if not (inspect.isclass(factory) and issubclass(factory, Optimizer)):
        if config.groups:
            raise ConfigError(
                f"optimizer.groups are for a class of optimizers, and optimizer.factory = {config.factory!r} is a "
                "function of the model: let it make the groups"
            )
        return _called("optimizer", config, factory, module)
    rest, groups = dict(module.named_parameters()), []
    for group in config.groups:
        matched = [name for name in rest if fnmatchcase(name, group.match)]
        if not matched:
            raise ConfigError(f"optimizer.groups: no parameter of the model (left) is called {group.match!r}")
        groups.append({"params": [rest.pop(name) for name in matched], **group.args})
    return _called("optimizer", config, factory, [*groups, {"params": list(rest.values())}] if rest else groups)


def _schedule_by_name(
    factory: Callable[..., Any], config: FactoryConfig, optimizer: Optimizer, total_steps: int
) -> Any:
    args = map_leaves(lambda leaf: total_steps if leaf == TOTAL_STEPS else leaf, config.args)
    return _called("lr_scheduler", replace(config, args=args), factory, optimizer)


def _called(part: str, config: FactoryConfig, factory: Callable[..., Any], given: Any) -> Any:
    try:
        return factory(given, **config.args)
    except Exception as error:
        raise ConfigError(
            f"{part}.factory = {config.factory!r} raised {type(error).__name__}: {error} (called with {config.args!r})"
        ) from error


class ScheduledOptimizer:
    """An optimizer of a model's parameters, with its learning rates. A discarded step changes nothing in it."""

    def __init__(
        self,
        module: nn.Module,
        recipe: OptimizerRecipe,
        config: DistributedTrainingConfig,
        total_steps: int,
        recorded_on: torch.device | None = None,
    ) -> None:
        """``recorded_on``: the device whose graphs hold the update, which then reads its rate there. Raise
        `ConfigError` for an optimizer or a schedule that is none."""
        self.config, self.recipe, self._recorded_on = config, recipe, recorded_on
        self.parameters = list(module.parameters())
        self._place = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self.optimizer = self._make_adamw() if recipe.optimizer is None else _made(recipe.optimizer, module)
        self._require_own_parameters()
        for group in self.optimizer.param_groups if recipe.optimizer is not None else ():
            if tensors := sorted(name for name, value in group.items() if isinstance(value, Tensor)):
                raise ConfigError(f"the optimizer's {tensors[0]} is a tensor, which others may hold: give a number")
        self._bases = [float(group["lr"]) if "lr" in group else None for group in self.optimizer.param_groups]
        self.scheduler = self._make_scheduler(total_steps)
        self._first = self._options()
        """The groups' options and the state of the schedule as they were made."""
        self.rate = self._bases[0] or config.learning_rate
        """The learning rate of the first group in the latest step."""

    @property
    def kind(self) -> str:
        """The class of the optimizer."""
        kind = type(self.optimizer)
        return _ADAMW if kind is _AdamW else f"{kind.__module__}.{kind.__qualname__}"

    @property
    def digest(self) -> str:
        """Return sixteen hex digits over how both were made, which all ranks must do alike."""
        whole = [self.kind, [group["params"] for group in self.options()["param_groups"]], self._first]
        return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def set_rate(self, rate: float) -> None:
        """Prepare a step whose learning rate by the settings is this. An optimizer of the caller's has its own rates,
        which follow the schedule of the settings; a scheduler has set them already."""
        groups, self.rate = self.optimizer.param_groups, rate
        if self.scheduler is None and self.recipe.optimizer is None:
            for group in groups:
                if self._recorded_on is None:
                    group["lr"] = rate
                else:
                    group["lr"].fill_(rate)  # where the recorded update reads it
            return
        if self.scheduler is None:
            for group, base in zip(groups, self._bases, strict=True):
                if base is not None:
                    group["lr"] = base * (rate / self.config.learning_rate)
        self.rate = float(groups[0].get("lr", rate))

    def advance(self) -> None:
        """Move the schedule on: the update of a step is done."""
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()

    def note_evaluation(self, loss: float) -> None:
        """Tell a schedule that follows evaluations of one."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)

    def tensors(self) -> dict[int, dict[str, Any]]:
        """Return what the optimizer keeps of each parameter, by its place in the model. The tensors are the live
        ones."""
        state, order = self.optimizer.state_dict()["state"], self._order()
        return {place: state[at] for place, at in sorted((place, at) for at, place in enumerate(order)) if at in state}

    def options(self) -> dict[str, Any]:
        """Return everything else of a checkpoint, as plain values: ``param_groups``, whose ``params`` are places in the
        model, and ``schedule``, of optimizers and schedulers of the caller's."""
        groups = self.optimizer.state_dict()["param_groups"]
        if self.recipe.optimizer is None:  # as they are on any device, with and without recordings
            groups = [{**group, "lr": self.rate, "capturable": False} for group in groups]
        order = iter(self._order())
        groups = [{**group, "params": [next(order) for _ in group["params"]]} for group in groups]
        if self.recipe.is_usual:
            return {"param_groups": groups}
        now = self._options()
        return {"param_groups": groups, "schedule": {"kind": self.kind, "first": self._first, "now": now}}

    def load(self, tensors: Mapping[int, Mapping[str, Any]], options: Mapping[str, Any] | None) -> None:
        """Take over what `tensors` and `options` have returned; of no options, go on with those as they were made."""
        order = self._order()
        groups = self.optimizer.state_dict()["param_groups"]
        state = {at: dict(tensors[place]) for at, place in enumerate(order) if place in tensors}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        for parameter, kept in self.optimizer.state.items():
            saved_values = tensors.get(self._place[id(parameter)], {})
            # A fused kernel walks through weights and moments as they lie in memory, and a file has them row by row.
            # torch has turned them into the type of the weights, which may hold less.
            for name, value in kept.items():
                if isinstance(value, Tensor):
                    saved_value = saved_values.get(name, value)
                    like = parameter if value.shape == parameter.shape else value
                    made = torch.empty_like(like, dtype=saved_value.dtype, device=value.device)
                    kept[name] = made.copy_(saved_value)
        saved = (options or {}).get("schedule")
        if saved is not None and not self.recipe.is_usual:
            self._load_options(saved)

    def explain_misfit(self, options: Mapping[str, Any]) -> str:
        """Return why these options of a checkpoint cannot be taken over, "" where they can."""
        saved = options.get("schedule") or {"kind": _ADAMW, "first": {"scheduler": None}}
        remedy = "train under another name, or begin with its weights (training.start_from)"
        if saved["kind"] != self.kind:
            return f"it was trained with {saved['kind']}, and the optimizer is {self.kind} now: {remedy}"
        places = [group["params"] for group in self.options()["param_groups"]]
        if not self.recipe.is_usual and [group["params"] for group in options["param_groups"]] != places:
            return f"its optimizer has other groups of parameters: {remedy}"
        before, now = saved["first"]["scheduler"], self._first["scheduler"]
        if (before is None) != (now is None):
            return f"it was trained with{'out' if before is None else ''} a scheduler of its own: {remedy}"
        kinds = saved["first"].get("scheduler_kind", ""), self._first["scheduler_kind"]
        if kinds[0] != kinds[1]:
            return f"it was trained with {kinds[0]}, and the scheduler is {kinds[1]} now: {remedy}"
        if before is not None and (odd := sorted(key for key in {*before, *now} if before.get(key) != now.get(key))):
            return (
                f"its scheduler began otherwise ({', '.join(odd)}), and goes on from its own state: keep epochs, "
                f"max_steps and the scheduler's arguments, or {remedy}"
            )
        return ""

    def _make_adamw(self) -> AdamW:
        config, on = self.config, self._recorded_on
        rate: Any = config.learning_rate if on is None else torch.tensor(config.learning_rate, device=on)
        capturable = on is not None and on.type == "cuda"
        groups = split_by_decay(self.parameters, config)
        return _AdamW(groups, lr=rate, weight_decay=config.weight_decay, fused=True, capturable=capturable)

    def _make_scheduler(self, total_steps: int) -> Any:
        make = self.recipe.lr_scheduler
        if make is None:
            return None
        if self.recipe.optimizer is None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.config.learning_rate
        made = make(self.optimizer, **({"total_steps": total_steps} if wants_total_steps(make) else {}))
        if isinstance(made, LRScheduler | ReduceLROnPlateau):
            if made.optimizer is not self.optimizer:
                raise ConfigError("lr_scheduler returned a scheduler of another optimizer than the one it was given")
            return made
        if not callable(made):
            raise ConfigError(
                f"lr_scheduler returned a {type(made).__name__}: return a scheduler of torch.optim.lr_scheduler, or a "
                "function from the step (from 0) to a factor, such as lambda optimizer: lambda step: 0.99**step"
            )
        return LambdaLR(self.optimizer, made)

    def _require_own_parameters(self) -> None:
        """Raise `ConfigError` unless the optimizer has exactly the parameters of the model that are trained."""
        grouped = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        if not grouped <= self._place.keys():
            raise ConfigError(
                "the optimizer has parameters that are not the model's: make it of the model that the function gets, "
                "such as optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)"
            )
        left = [each for each in self.parameters if each.requires_grad and id(each) not in grouped]
        if left:
            raise ConfigError(
                f"{len(left)} parameters need a gradient and are in no group of the optimizer: add them, or freeze "
                "them where the model is created (requires_grad_(False)), since gradients of all count for clip_norm"
            )

    def _order(self) -> list[int]:
        """Return the place in the model of each parameter, in the order of the groups."""
        return [self._place[id(each)] for group in self.optimizer.param_groups for each in group["params"]]

    def _options(self) -> dict[str, Any]:
        """Return a copy of the options of the groups, and of the state of the scheduler; None without one."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        kind = "" if self.scheduler is None else type(self.scheduler).__qualname__
        return copy.deepcopy({"groups": groups, "scheduler": scheduler, "scheduler_kind": kind})

    def _load_options(self, saved: Mapping[str, Any]) -> None:
        """Take over what has changed since the optimizer was made, such as rates that a scheduler has set. What the
        caller has changed in the meantime is as it is now."""
        before, then = saved["first"]["groups"], saved["now"]["groups"]
        for group, first, last in zip(self.optimizer.param_groups, before, then, strict=True):
            for name, value in last.items():
                if value != first.get(name):
                    group[name] = tuple(value) if isinstance(group.get(name), tuple) else copy.deepcopy(value)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(copy.deepcopy(saved["now"]["scheduler"]))


_ADAMW = f"{AdamW.__module__}.{AdamW.__qualname__}"


class _AdamW(AdamW):
    """torch's AdamW without the import of torch's compiler. Each method would load it, for a second or two of a rank's
    start, only to keep itself out of a compiled graph. No step here is compiled together with its optimizer."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    step = torch.no_grad()(inspect.unwrap(AdamW.step))


def split_by_decay(parameters: Sequence[nn.Parameter], config: DistributedTrainingConfig) -> list[dict[str, Any]]:
    """Return AdamW's groups by the settings: weights of norms and biases have one dimension."""
    decays = [each for each in parameters if each.ndim > 1 or config.decay_norms_and_biases]
    others = [each for each in parameters if not (each.ndim > 1 or config.decay_norms_and_biases)]
    groups = ((decays, config.weight_decay), (others, 0.0))
    return [{"params": members, "weight_decay": decay} for members, decay in groups if members]


def is_like(value: Any, parameter: Tensor) -> bool:
    """Return whether a value that an optimizer keeps is a tensor like the parameter, which is divided as it is."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def wants_total_steps(function: Callable[..., Any]) -> bool:
    """Return whether a function has an argument ``total_steps`` that has no value yet."""
    wanted = inspect.signature(function).parameters.get("total_steps")
    return wanted is not None and wanted.default in (inspect.Parameter.empty, None)


def _made(make: Callable[[nn.Module], Any], module: nn.Module) -> Optimizer:
    made = make(module)
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"optimizer returned a {type(made).__name__}: give a function from the model to a torch.optim.Optimizer, "
            "such as optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    return made
