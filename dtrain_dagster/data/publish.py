"""The copy of a dataset that the nodes of the cluster read: made once, never changed."""

from __future__ import annotations

import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dtrain_dagster.data.errors import DataError
from trainer.data.manifest import checked_manifest, manifest_bytes, parse_manifest
from trainer.documents.places import PlaceError, checked_id, inside
from trainer.storage.open import open_storage

PARALLEL = 4
BLOCK = 1 << 20


def published_uri(uri: str, dataset_id: str, shared_uri: str) -> str:
    """Return the address that a dataset's copy has, whether it was made or not. Raise `DataError` for an id that cannot
    be part of one."""
    try:
        checked_id(dataset_id, f"dataset_id in {uri}/manifest.json")
    except PlaceError as error:
        raise DataError(str(error)) from None
    return f"{shared_uri}/datasets/{dataset_id}"


def publish_dataset(uri: str, dataset_id: str, shared_uri: str) -> tuple[str, int]:
    """Copy a dataset's folder from this machine to ``<shared>/datasets/<id>``; return (its address there, bytes
    copied).

    The manifest goes last, so that a dataset is there as a whole or not at all; shards that an earlier, interrupted
    call has copied are not copied again. Raise `DataError` where a shard differs from its manifest, `DatasetError`
    where the manifest is damaged or another dataset's.
    """
    source, target = Path(uri), open_storage(published_uri(uri, dataset_id, shared_uri))
    if target.is_local and target.local_path() == source:
        return uri, 0
    if target.exists("manifest.json"):
        return target.uri, 0
    given = open_storage(uri)
    text = manifest_bytes(given)
    manifest = checked_manifest(parse_manifest(text, given), given, dataset_id)
    there = set(target.list("data"))

    def copy(shard: dict[str, object]) -> int:
        name = str(shard["path"])
        try:
            path = inside(source, name, f"a shard in {uri}/manifest.json")
        except PlaceError as error:
            raise DataError(str(error)) from None
        if Path(name).name in there and target.size(name) == shard["bytes"]:
            return 0
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard["sha256"]:
                raise DataError(f"{source / name} does not match its manifest; delete {uri} and rebuild the dataset")
            file.seek(0)
            with target.stream(name) as copied:
                shutil.copyfileobj(file, copied, BLOCK)
            return file.tell()

    with ThreadPoolExecutor(PARALLEL) as pool:
        copied = sum(pool.map(copy, manifest["shards"]))
    target.write("manifest.json", text)
    return target.uri, copied + len(text)
