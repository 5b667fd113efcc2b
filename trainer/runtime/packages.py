"""Whether a package is installed, without importing it; and what is loaded when it is needed."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from typing import Any


def load(name: str) -> Any:
    """Return what is called ``module:name``, whose module is imported now: for tables of what few processes need."""
    module, _, found = name.partition(":")
    return getattr(importlib.import_module(module), found)


def installed_version(package: str) -> tuple[int, int]:
    """Return the first two numbers of the version of an installed package. Raise
    `importlib.metadata.PackageNotFoundError` where it is not installed."""
    major, minor, *_ = importlib.metadata.version(package).split(".")
    return int(major), int(minor)


def pinned(packages: Iterable[str]) -> list[str]:
    """Return ``name==version`` of each package as installed here, in order of the names, without a local label such as
    ``+cpu``, which no index serves."""
    return [f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in sorted(set(packages))]


def is_installed(module: str) -> bool:
    """Return whether a module can be imported here. A folder that only has its name, and no ``__init__.py``, is none:
    such as a folder ``tensorflow`` of somebody's own. None of its packages is run."""
    top, _, rest = module.partition(".")
    try:
        found = importlib.util.find_spec(top)
    except ValueError:  # it is imported already, and says nothing of where from
        return True
    if found is None or found.origin is None:
        return False
    folders = list(found.submodule_search_locations or ())
    return not rest or any(importlib.machinery.PathFinder.find_spec(module, [folder]) is not None for folder in folders)
