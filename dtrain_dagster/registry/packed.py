"""The files of a packed model: their digest, recorded at registration, and the files as a registry gives them back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.runtime.scratch import scratch_folder

PACKED_TAG = "packed_sha256"
"""The version's tag with the digest of all registered files. Nodes report metrics; they change no versions."""
_ADDED = {"registered_model_meta"}
"""Files that MLflow itself adds to a model that it gives out."""


class PackedError(ValueError):
    """A refusal of a registered model that cannot be used. The message names it and says why."""


def folder_digest(folder: Path) -> str:
    """Return the sha256 over the names and the contents of all files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(item for item in folder.rglob("*") if item.is_file() and item.name not in _ADDED):
        content = hashlib.sha256()
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                content.update(piece)
        digest.update(f"{path.relative_to(folder).as_posix()}\0{content.hexdigest()}\n".encode())
    return digest.hexdigest()


def refuse_changed_files(what: str, folder: Path, expected: str | None) -> None:
    """Raise `PackedError` where the files are not the registered ones. Versions of older releases have no digest."""
    if expected and (found := folder_digest(folder)) != expected:
        raise PackedError(
            f"{what}: its files have the digest {found[:12]}…, but {expected[:12]}… was registered: they were "
            "changed since, and are not loaded; register the model again, and check who can write there"
        )


@contextmanager
def packed_files(name: str, version: str, tracking_uri: str) -> Iterator[Path]:
    """Yield the folder of a version, as the registry gives it out, checked. Raise `PackedError` where it is not as
    registered, and MLflow's own error where there is none."""
    from dtrain_dagster.registry.client import open_client

    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow.artifacts import download_artifacts

    client = open_client(tracking_uri)
    tags = client.get_model_version(name, version).tags
    # A ``models:/`` address would be looked up in the process's global registry, whatever is asked for here.
    source = client.get_model_version_download_uri(name, version)
    with scratch_folder("model") as scratch:
        folder = Path(download_artifacts(source, dst_path=str(scratch), tracking_uri=tracking_uri))
        refuse_changed_files(f"{name} version {version}", folder, tags.get(PACKED_TAG))
        yield folder
