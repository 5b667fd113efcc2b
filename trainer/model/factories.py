"""Parts by name: a stock part (``tcn``) or one of the user's own (``package.module:factory``), built with clear errors.

Only modules that the settings allow are imported: ``DTRAIN_FACTORY_MODULES``, see `trainer.model.allowed_factories`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

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
