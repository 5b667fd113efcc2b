"""Datasets that are named after their content and their settings: each is built once, and appears whole or not at all,
here and where the nodes read it.

What is in a dataset is said by the builder of its kind (`rows`, `sharding`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.support.building import building_in
from trainer.data.manifest import (
    DatasetError,
    checked_manifest,
    load_manifest,
    manifest_bytes,
    parse_manifest,
    read_dataset_manifest,
)
from trainer.documents.places import PlaceError, checked_id, inside
from trainer.storage.open import open_storage

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_ROWS = 1 << 16
"""Rows of a row group of a table's shards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltDataset:
    """A reference to a dataset that can be trained on."""

    uri: str
    dataset_id: str
    rows: int
    samples: dict[str, int]
    excluded: dict[str, str]
    """The tickers, or the columns of a table, that were left out, each with the reason."""
    built: bool
    """False where it already existed."""
    shared_uri: str = ""
    """The address where nodes read it."""

    @classmethod
    def of(cls, uri: str, manifest: Mapping[str, Any], built: bool = False) -> BuiltDataset:
        """Return a reference to the dataset in a folder with this manifest."""
        return cls(
            uri=uri,
            dataset_id=manifest["dataset_id"],
            rows=sum(shard.get("rows", 0) for shard in manifest.get("shards", ())),
            samples=dict(manifest["samples"]),
            excluded=dict(manifest.get("excluded", {})),
            built=built,
            shared_uri=uri,
        )

    def manifest(self) -> dict[str, Any]:
        """Return the manifest. Raise `DatasetError` where it is damaged."""
        return load_manifest(open_storage(self.uri))


def id_of(identity: Mapping[str, Any]) -> str:
    """Return the id of a dataset that is made of these inputs. Pure."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def digest_files(files: Sequence[Path]) -> list[str]:
    """Return the sha256 of each file. Raise `DataError` for one that cannot be read."""
    found = []
    for path in files:
        try:
            with open(path, "rb") as file:
                found.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): name a file that is there") from None
    return found


def build_once(storage_uri: str, dataset_id: str, write: Callable[[Path], dict[str, Any]]) -> BuiltDataset:
    """Return ``<storage>/datasets/<id>``, which is built unless it exists. ``write`` gets an empty folder with a folder
    ``data`` in it, writes the shards there and returns the manifest. Raise `DataError` where the existing dataset is
    damaged, and what ``write`` raises; then nothing is left."""
    folder = Path(storage_uri) / "datasets"
    target = folder / dataset_id
    built = not (target / "manifest.json").exists()
    if built:
        with building_in(folder) as building:
            (building / "data").mkdir()
            manifest = write(building)
            (building / "manifest.json").write_text(json.dumps(manifest, indent=1))
            read_dataset_manifest(open_storage(str(building)))  # what nodes would refuse is refused here
            give_name(building, target)
    else:
        verify_shards(str(target))
    return BuiltDataset.of(str(target), read_dataset_manifest(open_storage(str(target))), built)


def give_name(building: Path, target: Path) -> None:
    """Rename a folder that is complete, unless another process has built the same meanwhile."""
    try:
        building.rename(target)
    except OSError:
        if not (target / "manifest.json").exists():
            raise


def verify_shards(uri: str) -> None:
    """Check that there is a manifest and that the sha256 and rows of each shard are as it says. Raise `DataError` that
    names the first fault."""
    import pyarrow.parquet as pq

    try:
        manifest = read_dataset_manifest(open_storage(uri))
    except DatasetError as error:
        raise DataError(f"{uri} has no manifest that can be read ({error}); rebuild the dataset") from error
    for shard in manifest["shards"]:
        path = _shard_path(uri, shard)
        if not path.exists():
            raise DataError(f"{path} is missing; delete {uri} and rebuild the dataset")
        if digest_files([path]) != [shard["sha256"]] or pq.read_metadata(path).num_rows != shard["rows"]:
            raise DataError(f"{path} does not match its manifest; delete {uri} and rebuild the dataset")


def _shard_path(uri: str, shard: Mapping[str, Any]) -> Path:
    """Return the file of a shard. Raise `DataError` for one outside of the dataset."""
    try:
        return inside(uri, shard["path"], f"a shard in {uri}/manifest.json")
    except PlaceError as error:
        raise DataError(str(error)) from None


def shard_entry(folder: Path, name: str, rows: int) -> dict[str, Any]:
    """Return what the manifest says of each finished shard."""
    path = folder / name
    return {"path": name, "rows": rows, "bytes": path.stat().st_size, "sha256": digest_files([path])[0]}


class TableShards:
    """The shards of one split of a table, written as rows come."""

    def __init__(self, folder: Path, split: str, schema: pa.Schema, most_rows: int) -> None:
        self.folder, self.split, self.schema, self.most_rows = folder, split, schema, most_rows
        self.shards: list[dict[str, Any]] = []
        self._waiting: list[pa.Table] = []
        self._writer: Any = None
        self._rows = 0

    def add(self, table: pa.Table) -> None:
        """Append rows, which are written once there are enough for a row group."""
        self._waiting.append(table)
        if sum(len(part) for part in self._waiting) >= min(GROUP_ROWS, self.most_rows - self._rows):
            self._write()

    def close(self) -> list[dict[str, Any]]:
        """Write what is left, and return the entries of the shards."""
        self._write()
        self._finish()
        return self.shards

    @property
    def _name(self) -> str:
        return f"data/{self.split}-{len(self.shards):05d}.parquet"

    def _write(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        self._waiting = []
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.folder / self._name, self.schema, compression="zstd")
        self._writer.write_table(table, row_group_size=GROUP_ROWS)
        self._rows += len(table)
        if self._rows >= self.most_rows:
            self._finish()

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self.shards.append(shard_entry(self.folder, self._name, self._rows) | {"split": self.split})
            self._writer, self._rows = None, 0


_PARALLEL = 4
"""The shards that are copied at once."""


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
    target = open_storage(published_uri(uri, dataset_id, shared_uri))
    if target.is_local and target.local_path() == Path(uri):
        return uri, 0
    if target.exists("manifest.json"):
        return target.uri, 0
    given = open_storage(uri)
    text = manifest_bytes(given)
    manifest = checked_manifest(parse_manifest(text, given), given, dataset_id)
    there = set(target.list("data"))

    def copy(shard: Mapping[str, Any]) -> int:
        path, name = _shard_path(uri, shard), shard["path"]
        if path.name in there and target.size(name) == shard["bytes"]:
            return 0
        if not path.exists():
            raise DataError(f"{path} is missing; delete {uri} and rebuild the dataset")
        with open(path, "rb") as file:  # once, so that what was verified is what is copied
            if hashlib.file_digest(file, "sha256").hexdigest() != shard["sha256"]:
                raise DataError(f"{path} does not match its manifest; delete {uri} and rebuild the dataset")
            file.seek(0)
            with target.stream(name) as copied:
                shutil.copyfileobj(file, copied, 1 << 20)
            return file.tell()

    with ThreadPoolExecutor(_PARALLEL) as pool:
        copied = sum(pool.map(copy, manifest["shards"]))
    target.write("manifest.json", text)
    return target.uri, copied + len(text)
