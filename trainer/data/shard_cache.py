"""The local cache of a dataset's arrays, with the checks of their owner and content.

The folder is this user's alone. An entry counts where every file is as it was left (size, times of change, which only
the system sets), or holds the same bytes (sha256); then it is read without another look at the dataset.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from trainer.data.manifest import DatasetError
from trainer.documents.places import PlaceError, own_folder

CACHE_VERSION = 2
RECORD = "complete.json"
_REMEDY = "point DTRAIN_CACHE (or DTRAIN_HOME, whose cache it is) to a folder of your own"


def default_cache_dir() -> Path:
    """Return ``DTRAIN_CACHE``, else ``dtrain`` in ``XDG_CACHE_HOME``, else a folder of this user under the temporary
    one."""
    if configured := os.environ.get("DTRAIN_CACHE"):
        return Path(configured)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "dtrain"
    return Path(tempfile.gettempdir()) / f"dtrain-cache-{os.geteuid()}"


def open_cache(folder: Path) -> Path:
    """Return the folder of all entries; make it if it is missing. Raise `DatasetError` if others may write to it."""
    try:
        return own_folder(folder, _REMEDY)
    except PlaceError as error:
        raise DatasetError(f"the cache of datasets cannot be trusted: {error}") from error


def own_file(path: Path, buffering: int = -1) -> IO[bytes]:
    """Open a new file for writing that only this user can open, whatever the umask."""
    return open(path, "xb", buffering, opener=lambda name, flags: os.open(name, flags, 0o600))


class HashedFile:
    """A file that is written in order, and computes its sha256 on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Append data and return the number of bytes written."""
        self._digest.update(data)
        return self._file.write(data)

    def finish(self) -> str:
        """Flush the file to the disk and return the sha256 of its content."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._digest.hexdigest()


def write_record(folder: Path, content: str, digests: Mapping[str, str]) -> None:
    """Record that the entry is whole. ``content``: the digest of its source (`trainer.data.manifest.content_digest`);
    ``digests``: file name → sha256."""
    files = {name: {**_state(folder / name), "sha256": digest} for name, digest in digests.items()}
    scratch = folder / f"{RECORD}.{os.getpid()}.tmp"
    scratch.unlink(missing_ok=True)
    with own_file(scratch) as file:
        file.write(json.dumps({"content": content, "files": files}).encode())
    os.replace(scratch, folder / RECORD)


def is_whole(folder: Path, content: str) -> bool:
    """Return whether the entry exists, was made of this content, belongs to this user alone, and is unchanged. A file
    that was copied or touched is read again, and counts if its digest is right. A changed file would otherwise be read
    as prices without an error."""
    try:
        record = json.loads((folder / RECORD).read_text())
        if record["content"] != content or not _is_ours(folder, stat.S_ISDIR):
            return False
        files = record["files"]
        if not files or not all(_is_ours(folder / name, stat.S_ISREG) for name in files):
            return False
        changed = [name for name, file in files.items() if _state(folder / name) != _without_digest(file)]
        for name in changed:
            if (
                _state(folder / name)["bytes"] != files[name]["bytes"]
                or _digest(folder / name) != files[name]["sha256"]
            ):
                return False
        if changed:
            write_record(folder, content, {name: file["sha256"] for name, file in files.items()})
        return True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _is_ours(path: Path, is_kind: Any) -> bool:
    found = os.lstat(path)
    return bool(is_kind(found.st_mode)) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _state(path: Path) -> dict[str, int]:
    found = os.lstat(path)
    return {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns}


def _without_digest(file: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in file.items() if name != "sha256"}


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
