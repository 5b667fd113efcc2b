"""Reading of a checkpoint's ``manifest.json``: its content and its writer. A checkpoint without one does not count."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

from trainer.documents import schemas
from trainer.documents.reader import DOCUMENT_BYTES, parse_document
from trainer.errors import DamagedError
from trainer.rundir import RunDir
from trainer.storage.base import Storage


class NoManifestError(ValueError):
    """An error for a file in place of the manifest that is none."""


NO_MANIFEST = (FileNotFoundError, NoManifestError)
"""What `read_checkpoint_manifest` raises where there is none. No other ValueError: storage that does not let us in
raises one (`trainer.storage.base.StorageAccessError`), and what cannot be read must not be taken for missing."""


def read_position(rundir: RunDir) -> tuple[int, int] | None:
    """Return the epoch and the samples used of it at the newest checkpoint; None where there is none, and of one of an
    older version."""
    latest = rundir.latest_checkpoint()
    try:
        return position_of(read_checkpoint_manifest(rundir.storage, latest[0])) if latest else None
    except NO_MANIFEST:
        return None


def position_of(manifest: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the epoch and the samples used of it at a checkpoint. Pure."""
    position = manifest.get("position")
    return (position["epoch"], position["samples"]) if position else None


def read_checkpoint_manifest(storage: Storage, folder: str) -> dict[str, Any]:
    """Return the manifest of a checkpoint. Raise one of `NO_MANIFEST` if there is none, and OSError if something in its
    place cannot be read: it is then unknown whether there is one."""
    name = f"{folder}/manifest.json"
    try:
        data = storage.read_bounded(name, DOCUMENT_BYTES)
    except DamagedError as error:
        raise OSError(errno.EIO, error.what, name) from error
    try:
        manifest: dict[str, Any] = parse_document(data, name, schemas.MANIFEST)
        return manifest
    except DamagedError as error:
        raise NoManifestError(str(error)) from error
