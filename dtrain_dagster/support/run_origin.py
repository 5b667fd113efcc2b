"""Runs that a command has started are given the code location that the UI knows: else its Overview leaves them out.

`dagster asset materialize` loads definitions from a module and knows no workspace, so its runs name no code location.
Here the workspace file beside it is asked which location has that module. Dagster's own ``dagster run
migrate-repository`` writes the same field.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg

if TYPE_CHECKING:
    from dagster._core.remote_origin import CodeLocationOrigin

WORKSPACE = "workspace.yaml"
_REPOSITORY = "__repository__"
"""Dagster's name of the one repository of `dagster.Definitions`."""
_log = logging.getLogger(__name__)


def name_code_location(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Write into the record of this run which code location of the workspace it is of, where it has none and that can
    be found out; return whether it was written. It never raises: only the Overview depends on it."""
    if run.remote_job_origin is not None or run.job_code_origin is None:
        return False
    try:
        pointer = run.job_code_origin.repository_origin.code_pointer
        module = getattr(pointer, "module", None)
        folder = Path(getattr(pointer, "working_directory", None) or ".")
        location = find_location(folder, module) if module else None
        if location is None:
            return False
        from dagster._core.remote_origin import RemoteRepositoryOrigin

        origin = RemoteRepositoryOrigin(location, _REPOSITORY).get_job_origin(run.job_name)
        instance.run_storage.replace_job_origin(run, origin)
    except Exception as error:  # of any kind: storages of others, workspace files of any content
        _log.debug("run %s has no code location: %s", run.run_id, error)
        return False
    return True


def find_location(folder: Path, module: str) -> CodeLocationOrigin | None:
    """Return the code location that the workspace file in a folder loads from this module; None where there is none."""
    path = folder / WORKSPACE
    if not path.is_file():
        return None
    from dagster._core.workspace.load import location_origins_from_yaml_paths

    found = location_origins_from_yaml_paths([str(path)])
    return next((item for item in found if item.loadable_target_origin.module_name == module), None)
