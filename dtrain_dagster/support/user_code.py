"""The code that leaves this machine: `trainer`, a user's own modules and what they import; no data, caches or secrets.

A job takes along the files that it imports (`stage_for_nodes`); whatever is installed is the business of its image. A
model takes along whole packages, and pinned requirements of what was installed (`stage_for_serving`). What either does
with the folder belongs to `clusters` and to `registry`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import trainer
from trainer.model.allowed_factories import is_module_allowed, modules_of_settings, remedy

_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages, also of another environment that this one builds on."""
SERVING_REQUIREMENTS = ("mlflow", "numpy", "pandas", "pydantic", "scipy", "torch")
"""The packages that `trainer.model.mlflow_model` imports, without those that only training needs."""


class StagingError(ValueError):
    """A user's module cannot be taken along. The message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class StagedCode:
    """``paths``: files and folders to put on the server's Python path; ``requirements``: ``name==version``."""

    paths: tuple[str, ...]
    requirements: tuple[str, ...]


def ensure_importable() -> None:
    """Put the working directory at the end of the Python path, where the nodes find a user's modules, too."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def stage_for_nodes(folder: Path, factories: Iterable[str]) -> list[str]:
    """Copy the code that runs on the nodes into ``folder``; return the relative paths of all files, sorted.

    ``factories``: names as in ``job.json``; only those written ``package.module:factory`` are a user's own. Raise
    `StagingError` for a module that cannot be found.
    """
    sources = trainer_sources() | own_sources(factories)
    for name, path in sources.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return sorted(name.as_posix() for name in sources)


def trainer_sources() -> dict[Path, Path]:
    """Return the sources of `trainer`: each one's relative path on a node → its file here."""
    package = Path(trainer.__file__).parent
    return {path.relative_to(package.parent): path for path in package.rglob("*.py")}


def own_sources(factories: Iterable[str]) -> dict[Path, Path]:
    """Return a user's sources that go to the nodes: each one's relative path there → its file here.

    These are the modules of ``factories`` and what they import from beside them, directly or not. `StagingError` for
    a module that is not allowed or cannot be found.
    """
    found: dict[Path, Path] = {}
    for factory in factories:
        module, separator, _ = factory.partition(":")
        if separator:
            if not is_module_allowed(module, modules_of_settings()):  # to find a module imports the packages above it
                raise StagingError(f"factory {factory!r} is not allowed to be imported; {remedy(module)}")
            found |= _own_files(module, factory)
    return found


def installed_versions(factories: Iterable[str]) -> tuple[str, ...]:
    """Return ``name==version`` of the distributions that ``factories`` come from, where those are installed: their
    files stay here, so that a version is all that tells one training from another."""
    modules = {module for module, separator, _ in (factory.partition(":") for factory in factories) if separator}
    tops = {module.split(".")[0] for module in modules if is_module_allowed(module, modules_of_settings())}
    tops = {top for top in tops if top != "trainer" and _local_source(top) is None}
    distributions = importlib.metadata.packages_distributions() if tops else {}
    return _pinned(name for top in tops for name in distributions.get(top, ()))


def digest_sources(sources: Mapping[Path, Path]) -> str:
    """Return twelve hex digits over relative paths and contents, as `trainer_sources` and `own_sources` find them."""
    digest = hashlib.sha256()
    for name in sorted(sources, key=Path.as_posix):
        digest.update(name.as_posix().encode() + b"\0" + hashlib.sha256(sources[name].read_bytes()).digest())
    return digest.hexdigest()[:12]


def _own_files(module: str, factory: str) -> dict[Path, Path]:
    """Relative path → source file: a user's module and what it imports from beside it; none if it is installed."""
    top = module.split(".")[0]
    if top == "trainer" or top in sys.stdlib_module_names:
        return {}
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise StagingError(f"factory {factory!r}: {module!r} cannot be imported here: {error}") from error
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise StagingError(
            f"factory {factory!r}: there is no module {module!r} on the Python path here, so it cannot be sent to the "
            "nodes; add its folder to PYTHONPATH"
        )
    origin = Path(spec.origin).resolve()
    if _INSTALLED & set(origin.parts):
        return {}  # the image has to have it
    depth = len(module.split(".")) - (0 if origin.name == "__init__.py" else 1)
    root = origin.parents[depth]
    files: set[Path] = set()
    waiting = [origin]
    while waiting:
        path = waiting.pop()
        if path in files:
            continue
        files.add(path)
        for name in _imports_with_packages(path, root):
            waiting += _files_below(root, name)
    own = {path for path in files if path.relative_to(root).parts[0] != "trainer"}
    return {path.relative_to(root): path for path in own}


def _imports_with_packages(path: Path, root: Path) -> Iterator[str]:
    """Dotted names that a module may mean by its imports, and the packages that it is in."""
    package = path.relative_to(root).parent.parts
    yield ".".join(package)
    try:
        tree = ast.parse(path.read_text(), str(path))
    except (SyntaxError, UnicodeDecodeError):
        return  # the nodes will say so, with the line
    yield from _imports(tree, package)


def _files_below(root: Path, name: str) -> list[Path]:
    """Files below ``root`` of a dotted name: its own and those of the packages that it is in."""
    parts = [part for part in name.split(".") if part]
    found = []
    for length in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:length])
        for path in (place.with_name(place.name + ".py"), place / "__init__.py"):
            if path.is_file():
                found.append(path)
    return found


def stage_for_serving(factories: Iterable[str], folder: Path) -> StagedCode:
    """Copy `trainer` and the modules behind ``package.module:factory`` names into ``folder``.

    A module's local imports are followed; a module that belongs to a package is copied with the whole package; what
    was installed from a distribution becomes a requirement. Raise `StagingError` for a module that is missing.
    """
    shutil.copytree(Path(trainer.__file__).parent, folder / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    own = [name.partition(":")[0] for name in factories if ":" in name]
    foreign = [name for name in own if not is_module_allowed(name, modules_of_settings())]
    if foreign:
        raise StagingError(f"the module {foreign[0]!r} is not allowed to be packed with a model; {remedy(foreign[0])}")
    if not own:
        return StagedCode((str(folder / "trainer"),), _pinned(SERVING_REQUIREMENTS))
    ensure_importable()
    distributions = importlib.metadata.packages_distributions()
    needed, seen, queue = set(SERVING_REQUIREMENTS), set[str](), list(own)
    while queue:
        name = queue.pop()
        top = name.partition(".")[0]
        if name in seen or top in sys.stdlib_module_names or top == "trainer":
            continue
        seen.add(name)
        source = _local_source(name)
        if source is not None:
            queue += [found for file in _copy(name, source, folder) for found in _imports_of_copy(file, folder)]
        elif top in distributions:
            needed.add(distributions[top][0])
        elif name in own:
            raise StagingError(f"there is no module {name!r} on the Python path, so the model cannot be packed with it")
    return StagedCode(tuple(str(path) for path in sorted(folder.iterdir())), _pinned(needed))


def _local_source(name: str) -> Path | None:
    """Return the file or package folder of a module that was not installed; None for any other."""
    try:
        top = importlib.util.find_spec(name.partition(".")[0])
        if top is None or _is_installed([top.origin or "", *(top.submodule_search_locations or ())]):
            return None
        spec = importlib.util.find_spec(name)  # imports the packages above it, which are local
    except (ImportError, ValueError, AttributeError):  # `from a import b` where b is no module
        return None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    return Path(spec.origin)


def _is_installed(places: Iterable[str]) -> bool:
    roots = {sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib")}
    return any(
        Path(place).is_relative_to(root) or _INSTALLED & set(Path(place).parts)
        for place in places
        if place
        for root in roots
    )


def _copy(name: str, source: Path, folder: Path) -> list[Path]:
    """Copy a module, or the outermost package it belongs to, under its dotted name; the Python files copied."""
    parts = name.split(".") if source.name == "__init__.py" else name.split(".")[:-1]
    parent = source.parent
    package: tuple[Path, list[str]] | None = None
    while parts and (parent / "__init__.py").exists():
        package = parent, parts
        parent, parts = parent.parent, parts[:-1]
    if package is None:
        target = folder.joinpath(*name.split(".")[:-1], source.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        return [target]
    target = folder.joinpath(*package[1])
    if target.exists():
        return []
    shutil.copytree(package[0], target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return sorted(target.rglob("*.py"))


def _imports_of_copy(file: Path, root: Path) -> Iterator[str]:
    return _imports(ast.parse(file.read_bytes(), str(file)), file.relative_to(root).parent.parts)


def _imports(tree: ast.AST, package: Sequence[str]) -> Iterator[str]:
    """Dotted names that a module of this package imports, relative ones resolved; `from a import b` gives ``a`` and
    ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
            yield from (".".join(filter(None, (base, alias.name))) for alias in node.names if alias.name != "*")


def _pinned(distributions: Iterable[str]) -> tuple[str, ...]:
    """``name==version`` as installed here, without a local label such as ``+cpu``, which no index serves."""
    return tuple(f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in sorted(set(distributions)))
