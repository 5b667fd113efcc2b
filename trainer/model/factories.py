"""Parts by name: a stock part (``tcn``) or one of the user's own (``package.module:factory``), built with clear errors,
and what models and losses of any kind of data give for two samples.

Only modules that the settings allow are imported: ``DTRAIN_FACTORY_MODULES``, see `trainer.model.allowed_factories`.
"""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import ConfigError, FactoryConfig
from trainer.model.allowed_factories import is_module_allowed, modules_of_settings, refuse_foreign, remedy


def build_from_factory(
    kind: str,
    config: FactoryConfig,
    stock: Mapping[str, Callable[..., Any]],
    *positional: Any,
    modules: tuple[str, ...] | None = None,
) -> Any:
    """Return ``factory(*positional, **config.args)``, where the factory is one of ``stock`` or a user's own.

    ``kind`` (``model`` or ``loss``) is the section of ``job.json``, for messages. ``modules``: those that may be
    imported; None: those of the settings. Raise `ConfigError` if the factory is not allowed, cannot be found, does not
    accept the arguments, or raises.
    """
    factory = find_factory(kind, config.factory, stock, modules_of_settings() if modules is None else modules)
    _check_arguments(kind, config, factory, positional)
    try:
        return factory(*positional, **config.args)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{kind}.factory = {config.factory!r} raised {type(error).__name__}: {error} (called with {config.args!r})"
        ) from error


def find_factory(
    kind: str, name: str, stock: Mapping[str, Callable[..., Any]], modules: tuple[str, ...]
) -> Callable[..., Any]:
    """Return a function or class by its name: one of ``stock``, or a user's own of one of ``modules``. Raise
    `ConfigError`, which names the section ``kind``, where it is not allowed or cannot be found."""
    if name in stock:
        return stock[name]
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        known = f"neither a stock {kind} ({', '.join(sorted(stock))}) nor" if stock else "not"
        raise ConfigError(f"{kind}.factory = {name!r} is {known} written as package.module:factory")
    refuse_foreign(kind, name, modules)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{kind}.factory = {name!r}: there is no module {error.name!r} on the nodes' Python path; "
                "install the package there or add its folder to PYTHONPATH"
            ) from error
        raise ConfigError(f"{kind}.factory = {name!r}: importing {module_name!r} failed: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"{kind}.factory = {name!r}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
    factory = getattr(module, attribute, None)
    if factory is None:
        raise ConfigError(f"{kind}.factory = {name!r}: the module {module_name!r} has no attribute {attribute!r}")
    if not callable(factory):
        raise ConfigError(f"{kind}.factory = {name!r} is a {type(factory).__name__}, not something to call")
    if not inspect.isfunction(factory) and not inspect.isclass(factory):
        raise ConfigError(f"{kind}.factory = {name!r} is a {type(factory).__name__}; it must be a function or a class")
    home = str(factory.__module__)
    if not is_module_allowed(home, modules):  # what a module has imported is not the module's own
        raise ConfigError(
            f"{kind}.factory = {name!r} is defined in the module {home!r}, which is not allowed; {remedy(home)}, "
            f"or write a function of your own in {module_name!r} that calls it"
        )
    return factory


def build_network(
    config: FactoryConfig,
    stock: Mapping[str, Callable[..., Any]],
    spec: Any,
    outputs: int,
    modules: tuple[str, ...] | None,
) -> nn.Module:
    """Return ``factory(spec, outputs, **args)``. Raise `ConfigError` where it is no module with parameters to train."""
    network = build_from_factory("model", config, stock, spec, outputs, modules=modules)
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
    loss = build_from_factory("loss", config, stock, spec, modules=modules)
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


def _check_arguments(
    kind: str, config: FactoryConfig, factory: Callable[..., Any], positional: tuple[Any, ...]
) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # written in C: the call itself will tell
        return
    try:
        signature.bind(*positional, **config.args)
    except TypeError as error:
        accepted = [str(parameter) for parameter in list(signature.parameters.values())[len(positional) :]]
        raise ConfigError(
            f"{kind}.args = {config.args!r} do not fit {kind}.factory = {config.factory!r}: {error}; "
            f"it accepts: {', '.join(accepted) or 'no arguments'}"
        ) from error
    hints = _hints(factory)
    for name in config.args:
        if name in hints and _is_code(hints[name]):
            raise ConfigError(
                f"{kind}.args.{name}: {kind}.factory = {config.factory!r} takes a function or a class there, and "
                "arguments are data: numbers, text, lists, maps; choose it inside the factory"
            )


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return annotations by parameter; empty where the annotations cannot be resolved."""
    target = vars(factory).get("__init__", factory) if inspect.isclass(factory) else factory
    try:
        return typing.get_type_hints(target)
    except Exception:  # such as a name that is only there for type checkers
        return {}


def _is_code(hint: Any) -> bool:
    """Whether an annotation takes functions or classes and nothing else."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        members = [each for each in typing.get_args(hint) if each is not type(None)]
        return bool(members) and all(_is_code(each) for each in members)
    return hint in (type, collections.abc.Callable, typing.Callable) or origin in (type, collections.abc.Callable)


def _shown(target: Tensor) -> str:
    return f"({', '.join(map(str, target.shape))},)" if target.dim() == 1 else str(tuple(target.shape))
