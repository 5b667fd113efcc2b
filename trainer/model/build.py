"""Models and losses by name, for each kind of dataset that has a description (`trainer.spec`): built, and tried on two
samples.

Only modules that the settings allow are imported: ``DTRAIN_FACTORY_MODULES``, see `trainer.model.allowed_factories`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.config import ConfigError, FactoryConfig, JobConfig
from trainer.model import losses, rows, stock
from trainer.model.factories import build_from_factory
from trainer.model.optimizer_check import try_optimizer
from trainer.model.optimizers import recipe_for
from trainer.model.sizes import model_bytes, sample_bytes
from trainer.performance.memory import ModelBytes
from trainer.spec import LEAST_STEP, ROWS, WINDOWS, DataSpec, RowSpec

QUICK_SECONDS = 8.0
"""What a pass may take so that two more are made to measure a sample: a rehearsal has a minute."""
Modules = tuple[str, ...] | None
"""Those that a factory may be of; None: those of the settings."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The parts of one kind of dataset."""

    spec: Any
    """The class of its description."""
    models: Mapping[str, Callable[..., nn.Module]]
    losses: Mapping[str, Callable[..., nn.Module]]
    wrap: Callable[[nn.Module, Any], nn.Module]
    """Puts a model behind what turns stored samples into its inputs."""
    shape: Callable[[Any], tuple[int, ...]]
    """The shape of one stored sample."""
    axes: str
    """What the dimensions of a batch are called."""


KINDS: Mapping[str, Kind] = {
    WINDOWS: Kind(
        DataSpec,
        stock.STOCK,
        losses.STOCK,
        stock.Standardize,
        lambda spec: (spec.window, len(spec.features)),
        "batch, window, features",
    ),
    ROWS: Kind(RowSpec, rows.MODELS, rows.LOSSES, rows.RowInputs, lambda spec: (len(spec.features),), "batch, columns"),
}


def build_model(config: FactoryConfig, spec: DataSpec | RowSpec, outputs: int, modules: Modules = None) -> nn.Module:
    """Return the model by name or ``package.module:factory``, called with ``(spec, outputs, **args)``, behind what
    turns stored samples into its inputs, and tried on two samples. Raise `ConfigError` where it cannot be used.

    Weights come from torch's global random state: seed it before.
    """
    kind = _kind_of(spec)
    network = build_from_factory("model", config, kind.models, spec, outputs, modules=modules)
    where = f"model.factory = {config.factory!r}"
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{where} returned a {type(network).__name__}; it must return a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ConfigError(f"{where} returned a model without parameters to train")
    model = kind.wrap(network, spec).eval()
    batch = torch.zeros(2, *kind.shape(spec))
    shape = tuple(batch.shape)
    try:
        with torch.no_grad():
            result = model(batch)
    except Exception as error:
        raise ConfigError(
            f"{where} failed on a batch of shape {shape} ({kind.axes}): {type(error).__name__}: {error}"
        ) from error
    got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
    if got != (2, outputs):
        raise ConfigError(
            f"{where} gave {got} for a batch of shape {shape}; expected {(2, outputs)}, because the loss asks for "
            f"{outputs} outputs per sample"
        )
    return model.train()


def build_loss(config: FactoryConfig, spec: DataSpec | RowSpec, modules: Modules = None) -> nn.Module:
    """Return the loss by name or ``package.module:factory``, called with ``(spec, **args)`` and tried on two samples.
    Raise `ConfigError` where it cannot be used."""
    loss = build_from_factory("loss", config, _kind_of(spec).losses, spec, modules=modules)
    where = f"loss.factory = {config.factory!r}"
    if not isinstance(loss, nn.Module):
        raise ConfigError(f"{where} returned a {type(loss).__name__}; it must return a torch.nn.Module")
    count = getattr(loss, "outputs", None)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(
            f"{where} returned a loss whose attribute outputs is {count!r}; it must be an int of 1 or more"
        )
    outputs, target = torch.zeros(2, count), mean_targets(spec, 2)
    predictive = None
    try:
        with torch.no_grad():
            found = loss(outputs, target)
            if isinstance(spec, DataSpec) and losses.gives_predictive(loss):
                predictive = loss.predictive(outputs)  # type: ignore[operator]
    except Exception as error:
        shown = f"({len(target)},)" if target.dim() == 1 else str(tuple(target.shape))
        raise ConfigError(
            f"{where} failed on outputs of shape {tuple(outputs.shape)} and a target of shape {shown}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Tensor) or found.shape != (2,):
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(
            f"{where} gave {got} for two samples; it must give one loss per sample, shape (2,), unreduced"
        )
    if predictive is not None and not isinstance(predictive, losses.Predictive):
        raise ConfigError(
            f"{where}: predictive() returned a {type(predictive).__name__}; it must return trainer.losses.Predictive"
        )
    if isinstance(spec, DataSpec):
        _check_corrections(where, loss)
    elif not spec.classes:
        _refuse_single_precision(where, loss, spec)
    return loss


def mean_targets(spec: DataSpec | RowSpec, count: int) -> Tensor:
    """Return targets of ``count`` samples: the mean of those of the training split, or the first class."""
    if isinstance(spec, RowSpec) and spec.classes:
        return torch.zeros(count, dtype=torch.int64)
    return torch.full((count,), spec.target_mean, dtype=torch.float64 if isinstance(spec, RowSpec) else torch.float32)


def training_step(
    job: JobConfig, spec: Any, inputs: NDArray[Any], steps: int, modules: Modules
) -> tuple[Tensor, ModelBytes]:
    """Build the loss, the model and the optimizer as a rank does, do a pass forward and backward, and return the losses
    (B,) and the bytes of the model, with those of a sample where it does a pass quickly and can do one of half as many.
    ``steps``: of the whole training."""
    criterion: Any = build_loss(job.loss, spec, modules)
    module = build_model(job.model, spec, int(criterion.outputs), modules)
    given = torch.from_numpy(np.array(inputs)).float()

    def run(samples: int) -> Tensor:
        losses: Tensor = criterion(module(given[:samples]).float(), mean_targets(spec, samples))
        losses.sum().backward()
        return losses.detach()

    began = time.monotonic()
    found = run(len(given))
    sample = None
    if time.monotonic() - began < QUICK_SECONDS:
        with suppress(Exception):  # such as of a layer that wants a batch of a certain size
            sample = sample_bytes(run, len(given) // 2, len(given))
    recipe = try_optimizer(module, recipe_for(job.optimizer, job.lr_scheduler, modules=modules), job.training, steps)
    return found, model_bytes(module, sample, recipe.moments)


def count_bytes(model: FactoryConfig, loss: FactoryConfig, spec: Any, modules: Modules) -> ModelBytes:
    """Return the bytes of the model that a rank would build, which takes no memory here. What a factory raises where
    it cannot build without numbers is raised."""
    criterion: Any = build_loss(loss, spec, modules)
    with torch.device("meta"):
        return model_bytes(build_model(model, spec, int(criterion.outputs), modules))


def _kind_of(spec: DataSpec | RowSpec) -> Kind:
    return KINDS[ROWS if isinstance(spec, RowSpec) else WINDOWS]


def _check_corrections(where: str, loss: nn.Module) -> None:
    """Raise `ConfigError` for a loss that calibrates, and does not say what."""
    names = getattr(loss, "corrections", None)
    is_told = isinstance(names, tuple) and bool(names) and all(isinstance(name, str) for name in names)
    if callable(getattr(loss, "calibrate", None)) and not is_told:
        raise ConfigError(
            f"{where} has calibrate(), and its attribute corrections is {names!r}; it must be a tuple of the names "
            "of arguments that calibrate() gives numbers for"
        )


def _refuse_single_precision(where: str, loss: nn.Module, spec: RowSpec) -> None:
    """Raise `ConfigError` for a loss that rounds targets, or what it forecasts, where single precision has too few
    numbers for them."""
    mean, unit = spec.target_mean, spec.target_std
    targets = mean + unit * (1 + LEAST_STEP * torch.arange(64, dtype=torch.float64))
    if len(targets.float().unique()) == len(targets):
        return
    point: Any = getattr(loss, "point", None)
    outputs = torch.zeros(len(targets), int(loss.outputs))  # type: ignore[arg-type]
    with torch.no_grad():
        is_rounded = len(loss(outputs, targets).unique()) < len(targets)
        if is_rounded or (callable(point) and point(outputs).dtype != torch.float64):
            raise ConfigError(
                f"{where} computes in single precision, in which numbers near the mean of "
                f"{spec.target!r}, {mean:.6g}, are too far apart for its deviation, {unit:.3g}: let it take "
                "spec.target_mean from the target first, which is float64, and let point() return float64; or take a "
                "constant from the target before the dataset is built"
            )
