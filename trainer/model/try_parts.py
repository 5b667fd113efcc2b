"""The checks of a model and a loss of any kind of data, once they are built: what they are, and what they give for two
samples.

How parts are found by name is `trainer.model.factories`; which stock parts there are, the modules of each kind say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import ConfigError, FactoryConfig
from trainer.model import factories


def build_network(
    config: FactoryConfig,
    stock: Mapping[str, Callable[..., Any]],
    spec: Any,
    outputs: int,
    modules: tuple[str, ...] | None,
) -> nn.Module:
    """Return ``factory(spec, outputs, **args)``. Raise `ConfigError` where it is no module with parameters to train."""
    network = factories.build_from_factory("model", config, stock, spec, outputs, modules=modules)
    where = f"model.factory = {config.factory!r}"
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{where} returned a {type(network).__name__}; it must return a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ConfigError(f"{where} returned a model without parameters to train")
    return network


def try_network(config: FactoryConfig, model: nn.Module, batch: Tensor, axes: str, expected: tuple[int, ...]) -> None:
    """Try a model on a batch of two samples, without gradients. ``axes``: what the dimensions of the batch are called;
    ``expected``: the shape of the result. Raise `ConfigError` where it fails, or gives another shape."""
    where, shape = f"model.factory = {config.factory!r}", tuple(batch.shape)
    model.eval()
    try:
        with torch.no_grad():
            result = model(batch)
    except Exception as error:
        raise ConfigError(
            f"{where} failed on a batch of shape {shape} ({axes}): {type(error).__name__}: {error}"
        ) from error
    finally:
        model.train()
    got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
    if got != expected:
        raise ConfigError(
            f"{where} gave {got} for a batch of shape {shape}; expected {expected}, because the loss asks for "
            f"{expected[-1]} outputs per sample"
        )


def build_criterion(
    config: FactoryConfig, stock: Mapping[str, Callable[..., Any]], spec: Any, modules: tuple[str, ...] | None
) -> nn.Module:
    """Return ``factory(spec, **args)``. Raise `ConfigError` where it is no module, or does not say how many outputs it
    needs."""
    loss = factories.build_from_factory("loss", config, stock, spec, modules=modules)
    where = f"loss.factory = {config.factory!r}"
    if not isinstance(loss, nn.Module):
        raise ConfigError(f"{where} returned a {type(loss).__name__}; it must return a torch.nn.Module")
    count = getattr(loss, "outputs", None)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(
            f"{where} returned a loss whose attribute outputs is {count!r}; it must be an int of 1 or more"
        )
    return loss


def try_criterion(config: FactoryConfig, loss: nn.Module, outputs: Tensor, target: Tensor) -> None:
    """Try a loss on two samples, without gradients. Raise `ConfigError` where it fails, or does not give one figure per
    sample."""
    where, shapes = f"loss.factory = {config.factory!r}", f"{tuple(outputs.shape)} and a target of shape "
    try:
        with torch.no_grad():
            losses = loss(outputs, target)
    except Exception as error:
        raise ConfigError(
            f"{where} failed on outputs of shape {shapes}{_shown(target)}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(losses, Tensor) or losses.shape != (2,):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ConfigError(
            f"{where} gave {got} for two samples; it must give one loss per sample, shape (2,), unreduced"
        )


def _shown(target: Tensor) -> str:
    return f"({', '.join(map(str, target.shape))},)" if target.dim() == 1 else str(tuple(target.shape))
