"""The code that a job takes along: the `trainer` package and the user's own modules, and nothing else.

What a user's module imports is taken along too, as far as it lies in the same folder of the Python path; what is
installed is the image's business. Only sources go: no data, no caches, no secrets that lie beside them.
"""

from __future__ import annotations

import ast
import importlib.util
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import trainer
from dtrain_dagster.clusters.base import ClusterError
from trainer.model.allowed_factories import is_allowed, modules_of_settings, remedy

_INSTALLED = {"site-packages", "dist-packages"}


def stage_code(folder: Path, factories: Iterable[str]) -> list[str]:
    """Copy what runs on the nodes into ``folder``; the relative paths of all files, sorted.

    ``factories``: names as in ``job.json``; only those written ``package.module:factory`` are a user's own.
    `ClusterError` for a module that cannot be found.
    """
    package = Path(trainer.__file__).parent
    copied = {path: path.relative_to(package.parent) for path in package.rglob("*.py")}
    for factory in factories:
        module, separator, _ = factory.partition(":")
        if separator:
            if not is_allowed(module, modules_of_settings()):  # to find a module imports the packages above it
                raise ClusterError(f"factory {factory!r} is not allowed to be imported; {remedy(module)}")
            copied |= _own_files(module, factory)
    for path, name in copied.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return sorted(name.as_posix() for name in copied.values())


def _own_files(module: str, factory: str) -> dict[Path, Path]:
    """Source file → its place, of a user's module and of what it imports from beside it; none of an installed one."""
    top = module.split(".")[0]
    if top == "trainer" or top in sys.stdlib_module_names:
        return {}
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise ClusterError(f"factory {factory!r}: {module!r} cannot be imported here: {error}") from error
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise ClusterError(
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
        for name in _imports(path, root):
            waiting += _resolve(root, name)
    own = {path for path in files if path.relative_to(root).parts[0] != "trainer"}
    return {path: path.relative_to(root) for path in own}


def _imports(path: Path, root: Path) -> Iterator[str]:
    """Dotted names that a module may mean by its imports, and the packages that it is in."""
    package = list(path.relative_to(root).parent.parts)
    yield ".".join(package)
    try:
        tree = ast.parse(path.read_text(), str(path))
    except (SyntaxError, UnicodeDecodeError):
        return  # the nodes will say so, with the line
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _resolve(root: Path, name: str) -> list[Path]:
    """Files below ``root`` of a dotted name: its own and those of the packages that it is in."""
    parts = [part for part in name.split(".") if part]
    found = []
    for length in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:length])
        for path in (place.with_name(place.name + ".py"), place / "__init__.py"):
            if path.is_file():
                found.append(path)
    return found
