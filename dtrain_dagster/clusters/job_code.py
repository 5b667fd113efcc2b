"""The code of a job on storage that the nodes share: the trainer and the modules of the job's own model and loss, once
per version.

Which files these are is in `dtrain_dagster.support.user_code`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.support.user_code import (
    StagingError,
    digest_sources,
    resolve_user_sources,
    stage_files,
    trainer_sources,
)
from trainer.config import FACTORY, PARTS
from trainer.rundir import JOB, RunDir


def stage_code(folder: Path, rundir: RunDir) -> str:
    """Return the folder that nodes import a job's code from, a folder of this version in ``folder``, which is made
    where it is missing. Raise `ClusterError` where a module of the job cannot be found."""
    version, sources = code_of(folder, factories_of(rundir))
    if not version.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=folder))
        try:
            stage_files(sources, made)
            made.chmod(0o755)
            os.rename(made, version)  # in one move: a node never sees half of it
        except OSError:
            if not version.is_dir():  # another submission has made it meanwhile
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return str(version)


def code_of(folder: Path, factories: Iterable[str]) -> tuple[Path, dict[Path, Path]]:
    """Return the folder of a job's code in ``folder``, whether it is made or not, and the files that belong there:
    relative path → file here. Raise `ClusterError` as `stage_code`."""
    try:
        sources = {**trainer_sources(), **resolve_user_sources(factories).files}
    except StagingError as error:
        raise ClusterError(str(error)) from None
    return folder / digest_sources(sources), sources


def factories_of(rundir: RunDir) -> list[str]:
    """Return what `factories_in` does of the job in a run directory."""
    return factories_in(rundir.read_json(JOB))


def factories_in(document: Mapping[str, Any] | None) -> list[str]:
    """Return the parts that a ``job.json`` names, and the function that makes its dataset where there is one; none for
    a command that has no such file."""
    job = document or {}
    found = [str(job[part]["factory"]) for part in PARTS if isinstance(job.get(part), dict)]
    kind, _, name = str((job.get("dataset") or {}).get("uri", "")).partition(":")
    return [*found, *([name] if kind == FACTORY else [])]


def with_code(launch: Mapping[str, Any], staged: str | Path | None, code: str) -> dict[str, Any]:
    """Return a launch whose nodes find their code: ``staged`` is the folder where they share it; in an image, folders
    of this machine mean nothing. Pure."""
    env = {name: value for name, value in launch["env"].items() if code != "image" or name != "PYTHONPATH"}
    return {**launch, "env": {**env, **({"PYTHONPATH": str(staged)} if staged else {})}}
