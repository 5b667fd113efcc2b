"""Parts by name: a stock part (``tcn``) or a user's own (``package.module:factory``), built with clear errors."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from trainer.config import ConfigError, FactoryConfig


def build(kind: str, config: FactoryConfig, stock: Mapping[str, Callable[..., Any]], *positional: Any) -> Any:
    """``factory(*positional, **config.args)``, where the factory is one of ``stock`` or a user's own.

    ``kind`` (``model`` or ``loss``) is the section of ``job.json``, for messages. Raises `ConfigError` if the factory
    cannot be found, does not accept the arguments, or raises.
    """
    factory = _find(kind, config.factory, stock)
    _check_arguments(kind, config, factory, positional)
    try:
        return factory(*positional, **config.args)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{kind}.factory = {config.factory!r} raised {type(error).__name__}: {error} (called with {config.args!r})"
        ) from error


def _find(kind: str, name: str, stock: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if name in stock:
        return stock[name]
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(
            f"{kind}.factory = {name!r} is neither a stock {kind} ({', '.join(sorted(stock))}) "
            "nor written as package.module:factory"
        )
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
    return factory


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
