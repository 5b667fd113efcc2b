"""The dataset as a node sees it: verified Parquet shards, turned once into memory-mapped arrays, gathered in batches.

Windows are never stored. A sample is the row where its window ends; a batch of windows is one vectorised gather from
the memory map, without a Python object per sample.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.spec import DataSpec
from trainer.storage import Storage

SCHEMA_VERSION = 1
_CACHE_VERSION = 1


class DatasetError(ValueError):
    """The dataset cannot be used. The message names the folder, what is wrong with it, and the remedy."""


def default_cache_dir() -> Path:
    """``DTRAIN_CACHE``, or a folder of this user under the system's temporary one."""
    configured = os.environ.get("DTRAIN_CACHE")
    return Path(configured) if configured else Path(tempfile.gettempdir()) / f"dtrain-cache-{os.getuid()}"


class DataShardManager:
    """Reads one dataset (R2.2). The arrays are shared by all processes of a node through the page cache."""

    def __init__(
        self, uri: str, cache_dir: str | os.PathLike[str] | None = None, expected_id: str | None = None
    ) -> None:
        self.storage = Storage(uri)
        self.manifest = _read_manifest(self.storage, expected_id)
        columns = self.manifest["columns"]
        self._features = [column["name"] for column in columns if column["role"] == "feature"]
        [self._target] = [column["name"] for column in columns if column["role"] == "target"]
        self._extra = [column["name"] for column in columns if column["role"] in ("auxiliary", "price")]
        self.tickers_by_code = sorted({ticker for shard in self.manifest["shards"] for ticker in shard["tickers"]})
        self.spec = self._spec()
        self.folder = self._cached(Path(cache_dir) if cache_dir else default_cache_dir())
        self._maps = {path.stem: np.load(path, mmap_mode="r") for path in self.folder.glob("*.npy")}
        rows, width = self._maps["features"].shape
        window = self.spec.window
        self._flat = _tensor(self._maps["features"]).view(-1)
        self._windows = self._flat.as_strided((rows - window + 1, window * width), (width, 1))
        self._targets = _tensor(self._maps["target"])
        self._ranges = {split: self._sample_ranges(split) for split in self.manifest["splits"]}

    def count(self, split: str) -> int:
        """Samples in a split."""
        return int(self._ranges[split][1][-1]) if len(self._ranges[split][1]) else 0

    def end_rows(self, split: str, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Row in which each sample's window ends, shape as ``positions``; positions count 0 … count - 1."""
        starts, ends = self._ranges[split]
        index = np.searchsorted(ends, positions, side="right")
        before = np.concatenate([[0], ends])[index]
        return starts[index] + (positions - before)

    @property
    def device(self) -> torch.device:
        """Where windows are gathered."""
        return self._targets.device

    @property
    def sample_bytes(self) -> int:
        """Of all features and targets."""
        return self._flat.nbytes + self._targets.nbytes

    def keep_on(self, device: torch.device) -> None:
        """Copy features and targets to this device; from now on, windows are gathered there."""
        self._targets, self._flat = self._targets.to(device, copy=True), self._flat.to(device, copy=True)
        self._windows = self._flat.as_strided(self._windows.shape, self._windows.stride())

    def gather(
        self, rows: NDArray[np.int64] | Tensor, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Windows that end in ``rows`` (B,): raw features (B, W, F) float32, and targets (B,) float32; on `device`,
        in the tensors ``out`` where they are given."""
        spec = self.spec
        index = (rows if isinstance(rows, Tensor) else torch.from_numpy(np.asarray(rows, dtype=np.int64))).to(
            self.device
        )
        first, shape = index - (spec.window - 1), (len(index), spec.window, len(spec.features))
        if out is None:
            return self._windows.index_select(0, first).view(shape), self._targets.index_select(0, index)
        torch.index_select(self._windows, 0, first, out=out[0].view(len(index), -1))
        torch.index_select(self._targets, 0, index, out=out[1])
        return out

    def column(self, name: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Values of any stored column in these rows."""
        if name in self._features:
            return self._maps["features"][rows, self._features.index(name)]
        return self._maps["target" if name == self._target else name][rows]

    def tickers(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Code of each row's ticker: its place in ``tickers_by_code``."""
        return self._maps["ticker"][rows]

    def dates(self, rows: NDArray[np.int64]) -> NDArray[np.datetime64]:
        """Date of each row."""
        return self._maps["date"][rows].astype("datetime64[D]")

    def _spec(self) -> DataSpec:
        norm = self.manifest["normalisation"]
        return DataSpec(
            dataset_id=self.manifest["dataset_id"],
            features=tuple(self._features),
            window=self.manifest["window"],
            horizon=self.manifest["horizon"],
            feature_mean=tuple(norm["features"][name]["mean"] for name in self._features),
            feature_std=tuple(norm["features"][name]["std"] for name in self._features),
            target=self._target,
            target_mean=norm["target"]["mean"],
            target_std=norm["target"]["std"],
        )

    def _sample_ranges(self, split: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(first end row, running number of samples) of each stretch of samples: O(segments), whatever their length."""
        starts, lengths, offset = [], [], 0
        for shard in self.manifest["shards"]:
            for segment in shard["segments"]:
                first, last = segment["samples"][split]
                if last > first:
                    starts.append(offset + first)
                    lengths.append(last - first)
            offset += shard["rows"]
        return np.array(starts, dtype=np.int64), np.cumsum(np.array(lengths, dtype=np.int64))

    def _cached(self, cache_dir: Path) -> Path:
        """Folder of this dataset's arrays; made once per node, under a lock, by whoever comes first."""
        folder = cache_dir / f"{self.manifest['dataset_id']}-v{_CACHE_VERSION}"
        if _cache_is_whole(folder):
            return folder
        cache_dir.mkdir(parents=True, exist_ok=True)
        with open(cache_dir / f"{folder.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _cache_is_whole(folder):
                return folder
            shutil.rmtree(folder, ignore_errors=True)
            for abandoned in cache_dir.glob(f"{folder.name}-*"):  # by a process that was killed: we hold the lock
                shutil.rmtree(abandoned, ignore_errors=True)
            building = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=cache_dir))
            try:
                self._convert(building)
                building.rename(folder)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
        return folder

    def _convert(self, folder: Path) -> None:
        """Parquet to npy, one row group at a time, so that memory stays bounded whatever the dataset's size."""
        import pyarrow.parquet as pq

        shards = self.manifest["shards"]
        rows = sum(shard["rows"] for shard in shards)
        code = {ticker: number for number, ticker in enumerate(self.tickers_by_code)}
        arrays = {
            "features": _create(folder / "features.npy", (rows, len(self._features)), np.float32),
            "target": _create(folder / "target.npy", (rows,), np.float32),
            "ticker": _create(folder / "ticker.npy", (rows,), np.int32),
            "date": _create(folder / "date.npy", (rows,), np.int32),
            **{name: _create(folder / f"{name}.npy", (rows,), np.float64) for name in self._extra},
        }
        at = 0
        for shard in shards:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                path = self._verified(shard, Path(scratch))
                file = pq.ParquetFile(path)
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group)
                    stop = at + table.num_rows
                    for number, name in enumerate(self._features):
                        arrays["features"][at:stop, number] = table.column(name).to_numpy()
                    arrays["target"][at:stop] = table.column(self._target).to_numpy()
                    arrays["date"][at:stop] = table.column("date").to_numpy().astype("datetime64[D]").astype(np.int32)
                    arrays["ticker"][at:stop] = [code[ticker] for ticker in table.column("ticker").to_pylist()]
                    for name in self._extra:
                        arrays[name][at:stop] = table.column(name).to_numpy()
                    at = stop
        if at != rows:
            raise DatasetError(
                f"{self.storage.uri}: the manifest says {rows} rows, the shards hold {at}; build it anew"
            )
        for array in arrays.values():
            array.flush()
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.npy")}
        (folder / "complete.json").write_text(json.dumps(sizes))

    def _verified(self, shard: dict[str, Any], scratch: Path) -> Path:
        """A local file with the shard's content, whose sha256 is what the manifest says."""
        try:
            path = self.storage.local_path(shard["path"]) if self.storage.is_local else scratch / "shard.parquet"
            if not self.storage.is_local:
                self.storage.fetch(shard["path"], path)
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError as error:
            raise DatasetError(f"{self.storage.uri}: {shard['path']} is missing; build the dataset anew") from error
        if digest != shard["sha256"]:
            raise DatasetError(
                f"{self.storage.uri}: {shard['path']} has sha256 {digest[:12]}…, the manifest says "
                f"{shard['sha256'][:12]}…: it is damaged or was changed; delete the folder and build the dataset anew"
            )
        return path


def _read_manifest(storage: Storage, expected_id: str | None) -> dict[str, Any]:
    try:
        manifest = json.loads(storage.read("manifest.json"))
    except FileNotFoundError as error:
        raise DatasetError(
            f"dataset.uri = {storage.uri!r} holds no manifest.json: it is not a dataset, or its building was "
            "interrupted; build it, or point dataset.uri to the right folder"
        ) from error
    except json.JSONDecodeError as error:
        raise DatasetError(f"{storage.uri}/manifest.json is not JSON: {error}") from error
    if not isinstance(manifest, dict) or "dataset_id" not in manifest:
        raise DatasetError(f"{storage.uri}/manifest.json does not describe a dataset: build it anew")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        found = manifest.get("schema_version")
        raise DatasetError(f"{storage.uri}: schema version {found}, this trainer reads {SCHEMA_VERSION}; build it anew")
    if expected_id is not None and manifest["dataset_id"] != expected_id:
        raise DatasetError(
            f"dataset.dataset_id = {expected_id!r}, but {storage.uri} holds {manifest['dataset_id']!r}: "
            "point dataset.uri to the right folder"
        )
    return manifest


def _cache_is_whole(folder: Path) -> bool:
    """Is every array as long as when it was written? A cut-short file would be read as garbage without a word."""
    try:
        sizes = json.loads((folder / "complete.json").read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, json.JSONDecodeError):
        return False


def _create(path: Path, shape: tuple[int, ...], kind: type) -> Any:
    """A memory map to fill. Its room is taken at once: on a disk that fills up later, a write through the map would
    kill the process without a word (SIGBUS)."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)
    with open(path, "r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            reason = f"no room to unpack the dataset ({error.strerror}); point DTRAIN_CACHE to a folder with more"
            raise OSError(error.errno, reason, str(path)) from error
    return array


def _tensor(array: NDArray[Any]) -> Tensor:
    """A tensor over the read-only map, without a copy. torch warns that writing to it is undefined; we only read."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
