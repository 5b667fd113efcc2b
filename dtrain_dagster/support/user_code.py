"""The code that leaves this machine: `trainer`, a user's own modules and what they import; no data, caches or secrets.

A job takes along the files that it imports (`stage_for_nodes`); whatever is installed is the business of its image. A
model takes along whole packages, and pinned requirements of what was installed (`stage_for_serving`). Which files these
are is decided in `user_sources`; what is done with the folder belongs to `clusters` and to `registry`.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import trainer
from dtrain_dagster.support.user_sources import (
    SERVING_REQUIREMENTS,
    StagingError,
    outermost_package,
    resolve_user_sources,
    script_sources,
)
from trainer.runtime.packages import pinned


@dataclass(frozen=True, slots=True)
class StagedCode:
    """``paths``: files and folders to put on the server's Python path; ``requirements``: ``name==version``."""

    paths: tuple[str, ...]
    requirements: tuple[str, ...]


def stage_for_nodes(folder: Path, factories: Iterable[str], script: str = "") -> list[str]:
    """Copy the code that runs on the nodes into ``folder``; return the relative paths of all files, sorted.

    ``factories``: names as in ``job.json``; only those written ``package.module:factory`` are a user's own. ``script``:
    the path of one that goes along, with what it imports. Raise `StagingError` for what cannot be found.
    """
    sources = {**trainer_sources(), **resolve_user_sources(factories).files}
    if script:
        if not Path(script).is_file():
            raise StagingError(f"the script {script} is no longer here, so it cannot be sent along")
        sources |= script_sources(Path(script))
    stage_files(sources, folder)
    return sorted(name.as_posix() for name in sources)


def stage_files(sources: Mapping[Path, Path], folder: Path) -> None:
    """Copy each file to its relative path in ``folder``."""
    for name, path in sources.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def trainer_sources() -> dict[Path, Path]:
    """Return the sources of `trainer`: each one's relative path on a node → its file here."""
    package = Path(trainer.__file__).parent
    return {path.relative_to(package.parent): path for path in package.rglob("*.py")}


def digest_user_code(factory: str) -> str:
    """Return what tells versions of a user's factory apart: a digest of the sources that a node gets, then
    ``name==version`` of the installed packages that they import, since their files stay here.

    Packages that every training needs are left out, unless the factory is one of theirs: an upgrade of torch does not
    make another model. So are local labels such as ``+cpu``, which tell builds of the same source apart. Raise
    `StagingError` for a module that is not allowed or cannot be found.
    """
    sources = resolve_user_sources([factory])
    top = factory.partition(":")[0].partition(".")[0]
    told = [sources.installed[name] for name in sources.installed if name == top or name not in SERVING_REQUIREMENTS]
    return " ".join((digest_sources(sources.files), *pinned(name for names in told for name in names)))


def digest_sources(sources: Mapping[Path, Path]) -> str:
    """Return twelve hex digits over relative paths and contents, as `trainer_sources` and `own_sources` find them."""
    digest = hashlib.sha256()
    for name in sorted(sources, key=Path.as_posix):
        digest.update(name.as_posix().encode() + b"\0" + hashlib.sha256(sources[name].read_bytes()).digest())
    return digest.hexdigest()[:12]


def stage_for_serving(factories: Iterable[str], folder: Path) -> StagedCode:
    """Copy `trainer` and the sources behind ``package.module:factory`` names into ``folder``.

    A module that belongs to a package is copied with the whole package, data included; what was installed from a
    distribution becomes a requirement. Raise `StagingError` for a module that is not allowed, is missing, or was
    installed without a distribution that could be required.
    """
    factories = list(factories)
    shutil.copytree(Path(trainer.__file__).parent, folder / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    sources = resolve_user_sources(factories, whole_packages=True)
    for factory in factories:
        top = factory.partition(".")[0].partition(":")[0]
        if ":" in factory and sources.installed.get(top) == ():
            raise StagingError(
                f"factory {factory!r}: {top} was installed without a distribution that could be required"
            )
    for relative, path in sources.files.items():
        root = path.parents[len(relative.parts) - 1]
        package = outermost_package(path, root)
        source = package or path
        target = folder / source.relative_to(root)
        if package and not target.exists():
            shutil.copytree(package, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        elif not package:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    needed = {*SERVING_REQUIREMENTS, *(names[0] for names in sources.installed.values() if names)}
    return StagedCode(tuple(str(path) for path in sorted(folder.iterdir())), tuple(pinned(needed)))
