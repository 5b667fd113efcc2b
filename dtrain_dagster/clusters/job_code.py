"""The code of a job on storage that the nodes share: the trainer and the modules of the job's own model and loss, once
per version.

Which files these are is in `dtrain_dagster.support.user_code`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

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
    try:
        sources = {**trainer_sources(), **resolve_user_sources(factories_of(rundir)).files}
    except StagingError as error:
        raise ClusterError(str(error)) from None
    version = folder / digest_sources(sources)
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


def factories_of(rundir: RunDir) -> list[str]:
    """Return the parts that ``job.json`` names, and the function that makes its dataset where there is one; none for a
    command that has no such file."""
    job = rundir.read_json(JOB) or {}
    found = [str(job[part]["factory"]) for part in PARTS if isinstance(job.get(part), dict)]
    kind, _, name = str((job.get("dataset") or {}).get("uri", "")).partition(":")
    return [*found, *([name] if kind == FACTORY else [])]
