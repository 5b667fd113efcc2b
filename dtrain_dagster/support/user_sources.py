"""The resolver of a user's sources: the files behind ``package.module:factory`` names and what these import.

What goes to the nodes, what is packed with a model, and what tells two trainings apart all follow from it, so they
cannot differ. It reads files and looks modules up; it runs none of the user's code. Copying belongs to `user_code`.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.model.allowed_factories import TORCH_MODULES, is_module_allowed, modules_of_settings, remedy

SERVING_REQUIREMENTS = ("mlflow", "numpy", "pandas", "pydantic", "scipy", "torch")
"""The packages that `trainer.model.mlflow_model` imports, without those that only training needs. Each is imported by
the name of its distribution."""
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages, also of another environment that this one builds on."""
_SUFFIXES = (*importlib.machinery.SOURCE_SUFFIXES, *importlib.machinery.EXTENSION_SUFFIXES)


class StagingError(ValueError):
    """A user's module cannot be taken along. The message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class UserSources:
    """A user's own files, and the installed packages that they import."""

    files: Mapping[Path, Path]
    """The path relative to a folder of the Python path → the file here."""
    installed: Mapping[str, tuple[str, ...]]
    """The top-level name of an installed package → the distributions that it comes from, () where that is unknown.
    Python's own modules and `trainer` are left out."""


def ensure_importable() -> None:
    """Put the working directory at the end of the Python path, where the nodes find a user's modules, too."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def resolve_user_sources(factories: Iterable[str], whole_packages: bool = False) -> UserSources:
    """Return the modules of ``factories`` and what they import from anywhere on the Python path, directly or not.

    ``factories``: names as in ``job.json``; only those written ``package.module:factory`` are a user's own.
    ``whole_packages``: of a package, all modules are taken and not only the imported ones. Raise `StagingError` for a
    module that is not allowed or cannot be found.
    """
    ensure_importable()
    return _resolve(dict(_modules_of(factories)), {}, whole_packages)


def script_sources(script: Path) -> dict[Path, Path]:
    """Return a script and the modules of the user that it imports: path relative to a folder → the file."""
    ensure_importable()
    found, before = {Path(script.name): script}, list(sys.path)
    sys.path.insert(0, str(script.parent))  # as Python does where it runs the script
    try:
        return dict(_resolve({}, found, whole_packages=False).files)
    finally:
        sys.path[:] = before


def _resolve(own: Mapping[str, str], files: dict[Path, Path], whole_packages: bool) -> UserSources:
    """Return ``files``, the modules of ``own`` (module → factory), and what any of them import."""
    installed: set[str] = set()
    waiting, seen = [*own, *(name for path in files.values() for name in _imports(path, ()))], set[str]()
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        if name in seen or top in sys.stdlib_module_names or top == "trainer":
            continue
        seen.add(name)
        try:
            root = _find_root(top)
        except ModuleNotFoundError:
            if name in own:
                raise _missing(own[name], name) from None
            continue
        if root is None:
            installed.add(top)
            continue
        paths = _files_below(root, name)
        if name in own and not _has_file(paths, root, name):
            raise _missing(own[name], name)
        if whole_packages:
            packages = {package for path in paths if (package := outermost_package(path, root))}
            paths += [path for package in sorted(packages) for path in _modules_in(package)]
        for path in paths:
            relative = path.relative_to(root)
            if relative not in files:
                files[relative] = path
                waiting += _imports(path, relative.parent.parts)
    return UserSources(files, _distributions(installed))


def outermost_package(path: Path, root: Path) -> Path | None:
    """Return the outermost package around a file, below ``root``, without a gap; None if it is in none."""
    package = None
    for folder in path.relative_to(root).parents:
        if not (root / folder / "__init__.py").is_file() or folder == Path():
            break
        package = root / folder
    return package


def _modules_of(factories: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the module of each factory of a user's own, and the factory."""
    for factory in factories:
        module, separator, _ = factory.partition(":")
        if separator and not is_module_allowed(module, TORCH_MODULES):
            if not is_module_allowed(module, modules_of_settings()):
                raise StagingError(f"factory {factory!r} is not allowed to be imported; {remedy(module)}")
            yield module, factory


def _missing(factory: str, module: str) -> StagingError:
    return StagingError(
        f"factory {factory!r}: there is no module {module!r} on the Python path here, so it cannot be sent along; add "
        "its folder to PYTHONPATH"
    )


def _find_root(top: str) -> Path | None:
    """Return the folder of the Python path of a top-level module, None if installed. Raise ModuleNotFoundError."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ModuleNotFoundError(top)
    places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    local = [place for place in places if Path(place).exists() and not _is_installed(Path(place))]
    return Path(local[0]).resolve().parent if local else None


def _is_installed(place: Path) -> bool:
    """Return whether a file or folder belongs to an installed distribution, or to Python itself."""
    roots = (sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib"))
    return bool(_INSTALLED & set(place.parts)) or any(place.is_relative_to(root) for root in roots)


def _files_below(root: Path, name: str) -> list[Path]:
    """Files below ``root`` of a dotted name: its own and those of the packages that it is in."""
    parts = name.split(".")
    places = [root.joinpath(*parts[:length]) for length in range(1, len(parts) + 1)]
    candidates = [
        path for place in places for path in (place / "__init__.py", *(Path(f"{place}{end}") for end in _SUFFIXES))
    ]
    return [path for path in candidates if path.is_file()]


def _has_file(paths: Sequence[Path], root: Path, name: str) -> bool:
    """Return whether ``paths`` contain the module of the whole name, and not only packages that it would be in."""
    place = root.joinpath(*name.split("."))
    return any(path == place / "__init__.py" or str(path).removeprefix(str(place)) in _SUFFIXES for path in paths)


def _modules_in(package: Path) -> list[Path]:
    hidden = (path for path in package.rglob("*.py") if any(part[0] == "." for part in path.relative_to(package).parts))
    return sorted(set(package.rglob("*.py")) - set(hidden))


def _imports(path: Path, package: Sequence[str]) -> Iterator[str]:
    """Dotted names that a module of this package imports; `from a import b` gives ``a`` and ``a.b``."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError):
        return  # whoever imports it will say so, with the line; an extension module has no source
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
            yield from (".".join(filter(None, (base, alias.name))) for alias in node.names if alias.name != "*")


def _distributions(tops: set[str]) -> dict[str, tuple[str, ...]]:
    """Return the distributions of top-level names; which file belongs to which takes a second to find out."""
    asked = tops - set(SERVING_REQUIREMENTS)
    known = importlib.metadata.packages_distributions() if asked else {}
    return {top: tuple(sorted(set(known.get(top, ())))) if top in asked else (top,) for top in sorted(tops)}
