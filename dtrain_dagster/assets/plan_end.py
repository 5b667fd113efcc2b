"""What the end of a graph needs, tried in the plan: storage, disks and the registry. Whatever fails there fails before
money is spent, and not once the training is paid for."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg

from dtrain_dagster.resources import GPUClusterResource, ProjectResource
from dtrain_dagster.support.secrets import redact
from trainer.storage.open import open_storage

if TYPE_CHECKING:
    from trainer.performance.memory import ModelBytes

ROOM = 64 << 20
"""Bytes that events, logs, reports and the code of a packed model take, at the least."""
_COPIES = 4
"""Copies of the weights in the temporary folder while a model is registered and its server asked."""


def refuse_what_cannot_end(
    cluster: GPUClusterResource,
    project: ProjectResource,
    model: ModelBytes | None,
    keep_checkpoints: int,
    registers: bool,
    run_id: str,
) -> None:
    """Try what a training's end needs. Raise `dagster.Failure` with all that is missing. ``model``: None where its
    bytes are not known; ``registers``: whether the graph registers what it trains."""
    problems = try_places(project, room_needed(model, keep_checkpoints))
    if registers:
        from dtrain_dagster.registry import RegistryError  # not above: loads MLflow

        try:
            cluster.registry(project, run_id).try_out(project.model_name, project.experiment)
        except RegistryError as error:
            problems.append(str(error))
    if problems:
        raise dg.Failure(
            "nothing was started, since the training could not finish: " + "; and ".join(problems),
            allow_retries=False,
        )


def room_needed(model: ModelBytes | None, keep_checkpoints: int) -> dict[str, int]:
    """Return the bytes that a training needs in its storage, in the home and in the temporary folder. Pure."""
    weights, checkpoint = 0, 0
    if model is not None:
        weights, checkpoint = model.parameters, model.parameters + 2 * model.trained
    return {  # of checkpoints there are the best one and one that is being written besides
        "storage": ROOM + weights + (keep_checkpoints + 2) * checkpoint, "home": ROOM + weights,
        "temporary": ROOM + _COPIES * weights,
    }  # fmt: skip


def try_places(project: ProjectResource, needed: Mapping[str, int]) -> list[str]:
    """Write to the storage of jobs, to the home and to the temporary folder, and return what is wrong with them. Disks
    are asked for room as long as they are of this machine; one that several places are on has to have it for all."""
    storage, name, problems = open_storage(project.shared_uri), f"dtrain-tried-{uuid.uuid4().hex[:8]}", []
    try:
        storage.write(name, b"")
        storage.delete(name)
    except Exception as error:  # each kind of storage has errors of its own
        problems.append(f"{redact(project.shared_uri)} cannot be written to ({redact(str(error))}): see DTRAIN_STORAGE")
    places = {"home": (Path(project.home), "DTRAIN_HOME"), "temporary": (Path(tempfile.gettempdir()), "TMPDIR")}
    if storage.is_local:
        places["storage"] = storage.local_path(), "DTRAIN_HOME"
    disks: dict[int, list[str]] = defaultdict(list)
    for place, (folder, setting) in places.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                disks[folder.stat().st_dev].append(place)
        except OSError as error:
            problems.append(f"{folder} cannot be written to ({error.strerror or error}): see {setting}")
    for of_disk in disks.values():
        folder, total = places[of_disk[0]][0], sum(needed[place] for place in of_disk)
        if (free := shutil.disk_usage(folder).free) < total:
            settings = " or ".join(sorted({places[place][1] for place in of_disk}))
            problems.append(
                f"the disk of {folder} has {free / 1e9:.3g} GB left, and this training needs {total / 1e9:.3g} GB "
                f"(checkpoints, the registered model, and copies on its way): make room, or see {settings}"
            )
    return problems
