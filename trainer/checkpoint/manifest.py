"""``manifest.json`` of a checkpoint: what it holds, and who wrote it. What has none counts for nothing."""

from __future__ import annotations

import errno
from typing import Any

from trainer.documents import schemas
from trainer.documents.reader import DOCUMENT_BYTES, parse_document
from trainer.errors import DamagedError
from trainer.storage.base import Storage


class NoManifestError(ValueError):
    """There is something, and it is no manifest."""


NO_MANIFEST = (FileNotFoundError, NoManifestError)
"""What `read_checkpoint_manifest` raises where there is none. No other ValueError: storage that does not let us in
raises one (`trainer.storage.base.StorageAccessError`), and what cannot be read must not be taken for missing."""


def read_checkpoint_manifest(storage: Storage, folder: str) -> dict[str, Any]:
    """The manifest of a checkpoint. One of `NO_MANIFEST` where there is none; OSError where something is in its place
    that cannot be read, for nobody knows then."""
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
