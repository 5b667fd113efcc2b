"""The manifest of a dataset, checked before anything is made of it: names become paths, figures become addresses. What
is to be checked of each kind of dataset is `trainer.data.kinds`.

A user who can write a dataset's folder can write its manifest, and its digests with it. So no entry may lead out of a
folder, past the end of an array, or to an invalid number.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from typing import Any

from trainer.data.kinds import check_rows, check_tokens, check_windows, kind_of
from trainer.documents.places import PlaceError, checked_id
from trainer.documents.reader import parse_document
from trainer.documents.schemas import many, mapping, obj, record, text, whole
from trainer.errors import DamagedError
from trainer.spec import ROWS, TOKENS, WINDOWS
from trainer.storage.base import Storage

SCHEMA_VERSION = 1
STANDARDISED = 2
"""The version of tables whose numbers are stored in deviations from the mean; those of version 1 are as they were."""
_TOLD = record(
    dataset_id=text, created_at=text, samples=mapping(whole()), excluded=mapping(text), masks=many(obj),
    source=record(sha256=text, last_date=text, first_date=text, title=text),
)  # fmt: skip
"""The entries that other programs than the trainer read."""
MOST_BYTES = 256 << 20
"""The largest manifest, in bytes: some hundred bytes for each ticker."""


class DatasetError(ValueError):
    """An error for a dataset that cannot be used. The message names the folder, what is wrong with it, and the
    remedy."""


class NoDatasetError(DatasetError):
    """An error for a folder without a dataset."""


def read_dataset_manifest(storage: Storage, expected_id: str | None = None) -> dict[str, Any]:
    """Return the checked manifest of the dataset in this folder. Raise `DatasetError` if none can be used, or if it is
    of another dataset than expected."""
    return checked_manifest(load_manifest(storage), storage, expected_id)


def checked_manifest(manifest: dict[str, Any], storage: Storage, expected_id: str | None = None) -> dict[str, Any]:
    """Return a loaded manifest after the checks of `read_dataset_manifest`, which raise `DatasetError`."""
    if "dataset_id" not in manifest:
        raise DatasetError(f"{storage.uri}/manifest.json does not describe a dataset: rebuild it")
    known = (SCHEMA_VERSION,) if manifest.get("kind", WINDOWS) in (WINDOWS, TOKENS) else (SCHEMA_VERSION, STANDARDISED)
    if (found := manifest.get("schema_version")) not in known:
        raise DatasetError(f"{storage.uri}: schema version {found}, this trainer reads {known[-1]}; rebuild it")
    check_manifest(manifest, storage.uri)
    if expected_id is not None and manifest["dataset_id"] != expected_id:
        raise DatasetError(
            f"dataset.dataset_id = {expected_id!r}, but {storage.uri} holds {manifest['dataset_id']!r}: "
            "point dataset.uri to the right folder"
        )
    return manifest


def load_manifest(storage: Storage) -> dict[str, Any]:
    """Return the unchecked manifest in this folder, see `parse_manifest`. Raise `NoDatasetError` if there is none."""
    return parse_manifest(manifest_bytes(storage), storage)


def manifest_bytes(storage: Storage) -> bytes:
    """Return the bytes of the manifest in this folder. Raise `NoDatasetError` if there is none, and `DatasetError` if
    it is too large or no regular file, such as a pipe. A link counts as its target."""
    where = f"{storage.uri}/manifest.json"
    try:
        if storage.is_local and not stat.S_ISREG(os.stat(storage.path("manifest.json")).st_mode):
            raise DatasetError(f"{where} is not a regular file: rebuild the dataset")
        if (size := storage.size("manifest.json")) > MOST_BYTES:
            raise DatasetError(f"{where} has {size:,} bytes, and a manifest has at most {MOST_BYTES:,}: rebuild it")
        return storage.read("manifest.json")
    except FileNotFoundError as error:
        raise NoDatasetError(
            f"dataset.uri = {storage.uri!r} holds no manifest.json: it is not a dataset, or building it was "
            "interrupted; build it, or point dataset.uri to the right folder"
        ) from error


def parse_manifest(data: bytes, storage: Storage) -> dict[str, Any]:
    """Return the manifest in these bytes; a missing key in it raises `DamagedError`, which names the file. Raise
    `DatasetError` if they are no manifest."""
    where = f"{storage.uri}/manifest.json"
    try:
        manifest = parse_document(data, where, None)
    except DamagedError as error:
        raise DatasetError(f"{where} is not valid JSON ({error.what}): rebuild the dataset") from error
    if not isinstance(manifest, dict):
        raise DatasetError(f"{where} does not describe a dataset: rebuild it")
    if wrong := _TOLD(manifest):
        raise DatasetError(f"{where} does not describe a dataset (it is {wrong}): rebuild it")
    return manifest


def check_manifest(manifest: dict[str, Any], uri: str) -> None:
    """Raise `DatasetError` if a manifest has a forbidden name, or its figures do not fit together."""
    try:
        checked_id(manifest["dataset_id"], "dataset_id")
        {WINDOWS: check_windows, ROWS: check_rows, TOKENS: check_tokens}[kind_of(manifest)](manifest)
    except PlaceError as error:
        raise DatasetError(f"{uri}/manifest.json: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = error.what if isinstance(error, DamagedError) else str(error)
        raise DatasetError(f"{uri}/manifest.json does not describe a dataset ({reason}): rebuild it") from error


def content_digest(manifest: dict[str, Any]) -> str:
    """Return the sha256 of what the arrays of a dataset of windows depend on: the digests, order and rows of its
    shards, its columns."""
    shards = [[shard.get("sha256"), shard["rows"], shard["tickers"]] for shard in manifest["shards"]]
    columns = [[column["name"], column["role"]] for column in manifest["columns"]]
    return hashlib.sha256(json.dumps([shards, columns]).encode()).hexdigest()
