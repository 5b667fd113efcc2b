"""The digest of a packed model's files, recorded at registration, and held against those that a registry gives back."""

from __future__ import annotations

import hashlib
from pathlib import Path

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
