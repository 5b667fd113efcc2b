"""The modules that may be named as factories: a setting of the deployment, never of a job, ``DTRAIN_FACTORY_MODULES``.

A factory is code that is imported and called by its name. A name may come from a launchpad, a ``job.json`` or a folder
that nodes write, so nothing is imported for its sake but what the environment allows: modules, separated by commas,
each of which stands for itself and what lies below it (``mine`` for ``mine.models``, not for ``mine_too``). Nothing
here imports anything that a name says.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from trainer.config import ConfigError, JobConfig
from trainer.spec import BINARY, LANGUAGE_MODEL, OWN, REGRESSION, ROWS, WINDOWS

VARIABLE = "DTRAIN_FACTORY_MODULES"
STOCK_OF_KIND: dict[str, dict[str, tuple[str, ...]]] = {
    WINDOWS: {
        "model": ("har_tcn", "tcn", "lstm", "transformer"),
        "loss": ("return_and_volatility", "student_t", "gaussian", "mse"),
    },
    ROWS: {"model": ("mlp", "linear"), "loss": ("squared_error", "logistic", "cross_entropy")},
    OWN: {"model": (), "loss": ("cross_entropy", "squared_error")},
}
"""Names of the stock parts for each kind of dataset, the usual one first."""
STOCK = {
    part: tuple(sorted({name for of_kind in STOCK_OF_KIND.values() for name in of_kind[part]}))
    for part in ("model", "loss")
}
"""Names of the stock parts, of all kinds of datasets, which are always allowed."""
TORCH_MODULES = ("torch.optim",)
"""The modules whose optimizers and schedulers are always allowed."""
KIND_WORDS = {WINDOWS: "a dataset of windows", ROWS: "a dataset of rows", OWN: "a dataset of your own"}
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


def parse_modules(text: str) -> tuple[str, ...]:
    """Return the modules that a value of `VARIABLE` names, in order. Raise ValueError for an invalid module name, and
    for a module of Python itself, which makes no models."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if not _MODULE.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a module, such as my_package or my_package.models")
        if name.partition(".")[0] in sys.stdlib_module_names:
            raise ValueError(f"{name!r} belongs to Python itself; name the modules of your own models and losses")
    return names


def modules_of_settings(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the modules that the environment allows, none if it is unset. Raise `ConfigError` for an invalid value."""
    text = (os.environ if environment is None else environment).get(VARIABLE, "")
    try:
        return parse_modules(text)
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}={text!r}: {error}") from None


def is_module_allowed(module: str, modules: tuple[str, ...]) -> bool:
    """Return whether a module is one of these, or lies below one of them."""
    return any(module == name or module.startswith(f"{name}.") for name in modules)


def remedy(module: str) -> str:
    """Return a sentence part that names the setting that allows a module."""
    return f"to allow it, set {VARIABLE}={module} (several: separated by commas) where dtrain is started"


def refuse_foreign(kind: str, factory: str, modules: tuple[str, ...]) -> None:
    """Raise `ConfigError` for a factory that is neither stock nor of an allowed module. Nothing is imported."""
    stock = STOCK.get(kind, ())
    if factory in stock:
        return
    if kind == "model" and factory == "gpt":
        raise ConfigError(f"model.factory = 'gpt': {LANGUAGE_MODEL}")
    module, separator, attribute = factory.partition(":")
    if not separator:
        known = f"neither a stock {kind} ({', '.join(stock)}) nor" if stock else "not"
        raise ConfigError(f"{kind}.factory = {factory!r} is {known} written as package.module:factory")
    if not _MODULE.fullmatch(module) or not attribute.isidentifier():
        raise ConfigError(f"{kind}.factory = {factory!r} is not written as package.module:factory")
    if not is_module_allowed(module, modules):
        known = f"{VARIABLE} allows {', '.join(modules)}" if modules else f"{VARIABLE} is not set"
        raise ConfigError(
            f"{kind}.factory = {factory!r}: the module {module!r} is not allowed to be imported ({known}); "
            f"{remedy(module)}"
        )


def refuse_foreign_factories(job: JobConfig) -> None:
    """Raise `ConfigError` for a job whose model, loss or dataset is not allowed here."""
    if job.is_of_script:  # its objects are made by the script, whose author starts it
        return
    allowed = modules_of_settings()
    for part, config in (("optimizer", job.optimizer), ("lr_scheduler", job.lr_scheduler)):
        if config is not None:
            refuse_foreign(part, config.factory, (*allowed, *TORCH_MODULES))
    refuse_foreign("model", job.model.factory, allowed)
    refuse_foreign("loss", job.loss.factory, allowed)
    if job.dataset.factory is not None:
        refuse_foreign("dataset", job.dataset.factory, allowed)


def refuse_other_kinds(job: JobConfig, kind: str) -> None:
    """Raise `ConfigError` for a stock model or loss of this job that is for another kind of dataset than this one."""
    for part, name in (("model", job.model.factory), ("loss", job.loss.factory)):
        known = STOCK_OF_KIND[kind][part]
        if name not in known and ":" not in name:
            such = f"{', '.join(known)}, or " if known else ""
            raise ConfigError(
                f"{part}.factory = {name!r} is not for {KIND_WORDS[kind]}: use {such}your own as package.module:factory"
            )


def usual_parts(kind: str, task: str | None, has_own_model: bool = False) -> tuple[str, str]:
    """Return the stock model and loss that are used where none is named. ``task``: that of a table; ``has_own_model``:
    whether another model is named, which makes one forecast of a window. Pure."""
    model, loss = (STOCK_OF_KIND[kind][part][0] for part in ("model", "loss"))
    if kind == WINDOWS and has_own_model:
        loss = "student_t"
    if kind == ROWS:
        loss = {REGRESSION: "squared_error", BINARY: "logistic"}.get(str(task), "cross_entropy")
    return model, loss
