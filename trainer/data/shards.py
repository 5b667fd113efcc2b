"""The dataset as a node sees it: verified Parquet shards, turned once into memory-mapped arrays, gathered in batches.

Windows are never stored. A sample is the row where its window ends; a batch of windows is one vectorised gather from
the memory map, without a Python object per sample.

A process holds the manifest, and nothing that grows with the rows: they are in the page cache, which all processes of a
node share and the kernel takes back when it needs room. A dataset that is larger than memory is read by the page.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.manifest import DatasetError, content_digest, read_dataset_manifest
from trainer.data.shard_cache import (
    CACHE_VERSION,
    HashedFile,
    default_cache_dir,
    is_whole,
    open_cache,
    own_file,
    write_record,
)
from trainer.documents.places import PlaceError, inside
from trainer.runtime.host_memory import available_bytes
from trainer.spec import spec_of
from trainer.storage.open import open_storage

_SAMPLES = ("features", "target")
"""The arrays that training reads; the others are read for evaluation."""
_BUFFER = 1 << 20


class DataShardManager:
    """Reads one dataset. The arrays are shared by all processes of a node through the page cache."""

    def __init__(
        self, uri: str, cache_dir: str | os.PathLike[str] | None = None, expected_id: str | None = None
    ) -> None:
        self.storage = open_storage(uri)
        self.manifest = read_dataset_manifest(self.storage, expected_id)
        columns = self.manifest["columns"]
        self._features = [column["name"] for column in columns if column["role"] == "feature"]
        [self._target] = [column["name"] for column in columns if column["role"] == "target"]
        self._extra = [column["name"] for column in columns if column["role"] in ("auxiliary", "price")]
        self.tickers_by_code = sorted({ticker for shard in self.manifest["shards"] for ticker in shard["tickers"]})
        self.spec = spec_of(self.manifest)
        self.folder = self._cached(Path(cache_dir) if cache_dir else default_cache_dir())
        self._maps = {path.stem: np.load(path, mmap_mode="r") for path in self.folder.glob("*.npy")}
        rows, width = self._maps["features"].shape
        self.is_larger_than_memory = sum(self._maps[name].nbytes for name in _SAMPLES) > available_bytes()
        if self.is_larger_than_memory:  # each window would bring in megabytes of neighbours, and push others out
            for name in _SAMPLES:
                _advise(self._maps[name], mmap.MADV_RANDOM, 0, rows)
        window = self.spec.window
        self._flat = _tensor(self._maps["features"]).view(-1)
        self._windows = self._flat.as_strided((rows - window + 1, window * width), (width, 1))
        self._targets = _tensor(self._maps["target"])
        self._ranges = {split: self._sample_ranges(split) for split in self.manifest["splits"]}

    def count(self, split: str) -> int:
        """Return the number of samples in a split."""
        return int(self._ranges[split][1][-1])

    def end_rows(self, split: str, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row in which each sample's window ends, shape as ``positions``; positions count 0 … count - 1."""
        starts, edges = self._ranges[split]
        index = np.searchsorted(edges, positions, side="right") - 1
        return starts[index] + (positions - edges[index])

    def will_need(self, split: str, first: int, last: int) -> None:
        """Have the kernel read the samples at positions [first, last) into memory, without waiting for it."""
        starts, edges = self._ranges[split]
        indices = range(
            int(np.searchsorted(edges, first, side="right")) - 1, int(np.searchsorted(edges, last, side="left"))
        )
        for index in indices:
            begin, end = max(first, int(edges[index])), min(last, int(edges[index + 1]))
            offset = int(starts[index]) - int(edges[index])
            self._read_ahead(begin + offset, end + offset)

    def _read_ahead(self, first: int, last: int) -> None:
        """Windows that end in rows [first, last), and their targets."""
        _advise(self._maps["features"], mmap.MADV_WILLNEED, first - self.spec.window + 1, last)
        _advise(self._maps["target"], mmap.MADV_WILLNEED, first, last)

    @property
    def device(self) -> torch.device:
        """The device on which windows are gathered."""
        return self._targets.device

    @property
    def sample_bytes(self) -> int:
        """The bytes of all features and targets."""
        return self._flat.nbytes + self._targets.nbytes

    def keep_on(self, device: torch.device) -> None:
        """Copy features and targets to this device; from now on, windows are gathered there."""
        self._targets, self._flat = self._targets.to(device, copy=True), self._flat.to(device, copy=True)
        self._windows = self._flat.as_strided(self._windows.shape, self._windows.stride())
        self.is_larger_than_memory = False  # it is not, there

    def gather(
        self, rows: NDArray[np.int64] | Tensor, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the windows that end in ``rows`` (B,): raw features (B, W, F) float32, and targets (B,) float32; on
        `device`, in the tensors ``out`` if they are given."""
        spec = self.spec
        index = (rows if isinstance(rows, Tensor) else torch.from_numpy(np.asarray(rows, dtype=np.int64))).to(
            self.device
        )
        if self.is_larger_than_memory:  # all at once, instead of page by page as the gather comes to them
            for row in index.tolist():
                self._read_ahead(row, row + 1)
        first, shape = index - (spec.window - 1), (len(index), spec.window, len(spec.features))
        if out is None:
            return self._windows.index_select(0, first).view(shape), self._targets.index_select(0, index)
        torch.index_select(self._windows, 0, first, out=out[0].view(len(index), -1))
        torch.index_select(self._targets, 0, index, out=out[1])
        return out

    def column(self, name: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return the values of any stored column in these rows."""
        if name in self._features:
            return self._maps["features"][rows, self._features.index(name)]
        return self._maps["target" if name == self._target else name][rows]

    def tickers(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the code of each row's ticker: its place in ``tickers_by_code``."""
        return self._maps["ticker"][rows]

    def dates(self, rows: NDArray[np.int64]) -> NDArray[np.datetime64]:
        """Return the date of each row."""
        return self._maps["date"][rows].astype("datetime64[D]")

    def _sample_ranges(self, split: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (first end row, samples before it) of each segment of samples, and the number of all: O(segments)."""
        starts, lengths, offset = [], [0], 0
        for shard in self.manifest["shards"]:
            for segment in shard["segments"]:
                first, last = segment["samples"][split]
                if last > first:
                    starts.append(offset + first)
                    lengths.append(last - first)
            offset += shard["rows"]
        return np.array(starts, dtype=np.int64), np.cumsum(np.array(lengths, dtype=np.int64))

    def _cached(self, cache_dir: Path) -> Path:
        """Return the folder of this dataset's arrays; the first process of a node makes it, under a lock."""
        name, content = self.manifest["dataset_id"], content_digest(self.manifest)
        folder = open_cache(cache_dir) / f"{name}-v{CACHE_VERSION}"
        if is_whole(folder, content):
            return folder
        from filelock import FileLock  # not above: most ranks find the arrays made

        with FileLock(cache_dir / f"{folder.name}.lock", fallback_to_soft=False):
            if is_whole(folder, content):
                return folder
            shutil.rmtree(cache_dir / f"{name}-v1", ignore_errors=True)  # of an earlier version, which checked less
            shutil.rmtree(folder, ignore_errors=True)
            for abandoned in cache_dir.glob(f"{folder.name}-*"):  # by a process that was killed: we hold the lock
                shutil.rmtree(abandoned, ignore_errors=True)
            building = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=cache_dir))
            try:
                write_record(building, content, self._convert(building))
                building.rename(folder)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
        return folder

    def _convert(self, folder: Path) -> dict[str, str]:
        """Parquet to npy, one row group (a ticker's history) at a time; file name → sha256. Written as files, not
        through a map: that room on the disk is missing is an error then, and not a killed process."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        shards = self.manifest["shards"]
        rows = sum(shard["rows"] for shard in shards)
        code = {ticker: number for number, ticker in enumerate(self.tickers_by_code)}
        kinds: dict[str, type] = {"features": np.float32, "target": np.float32, "ticker": np.int32, "date": np.int32}
        kinds |= dict.fromkeys(self._extra, np.float64)
        converted = 0
        try:
            with ExitStack() as stack:
                files = {
                    name: HashedFile(stack.enter_context(own_file(folder / f"{name}.npy", _BUFFER))) for name in kinds
                }
                for name, kind in kinds.items():
                    shape = (rows, len(self._features)) if name == "features" else (rows,)
                    _write_header(files[name], kind, shape)
                for shard in shards:
                    with tempfile.TemporaryDirectory(dir=folder) as scratch, ExitStack() as opened:
                        handle = opened.enter_context(self._verified(shard, Path(scratch)))
                        file = pq.ParquetFile(handle)
                        if file.metadata.num_rows != shard["rows"]:  # before it is unpacked
                            raise DatasetError(self._claims(shard["rows"], file.metadata.num_rows))
                        for group in range(file.num_row_groups):
                            table = file.read_row_group(group)
                            for name, values in self._columns_of(table, code).items():
                                files[name].write(np.ascontiguousarray(values, dtype=kinds[name]).data)
                            converted += table.num_rows
                digests = {f"{name}.npy": file.finish() for name, file in files.items()}
        except (pa.ArrowException, KeyError) as error:
            raise DatasetError(f"{self.storage.uri}: a shard is not what its manifest says ({error})") from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            reason = f"no room to unpack the dataset ({error.strerror}); point DTRAIN_CACHE to a folder with more"
            raise OSError(error.errno, reason, str(folder)) from error
        if converted != rows:
            raise DatasetError(self._claims(rows, converted))
        return digests

    def _claims(self, said: int, held: int) -> str:
        return f"{self.storage.uri}: the manifest says {said} rows, the shards hold {held}; rebuild it"

    def _columns_of(self, table: Any, code: dict[str, int]) -> dict[str, NDArray[Any]]:
        """Return the part of each array that some rows of a shard hold."""
        tickers = table.column("ticker").combine_chunks().dictionary_encode()
        codes = np.array([code[ticker] for ticker in tickers.dictionary.to_pylist()], dtype=np.int32)
        return {
            "features": np.column_stack([table.column(name).to_numpy() for name in self._features]),
            "target": table.column(self._target).to_numpy(),
            "ticker": codes[tickers.indices.to_numpy()],
            "date": table.column("date").to_numpy().astype("datetime64[D]").astype(np.int32),
            **{name: table.column(name).to_numpy() for name in self._extra},
        }

    def _verified(self, shard: dict[str, Any], scratch: Path) -> IO[bytes]:
        """Return the shard, open, after its sha256 was checked against the manifest: the bytes that are read are those
        that were checked."""
        name = shard["path"]
        try:
            if self.storage.is_local:
                path = inside(self.storage.local_path(), name, "the path of a shard")
            else:
                path = scratch / "shard.parquet"
                self.storage.fetch(name, path)
            file = open(path, "rb")  # noqa: SIM115 - the caller closes it
        except FileNotFoundError as error:
            raise DatasetError(f"{self.storage.uri}: {name} is missing; rebuild the dataset") from error
        except PlaceError as error:
            raise DatasetError(f"{self.storage.uri}: {error}") from error
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != shard["sha256"]:
            file.close()
            raise DatasetError(
                f"{self.storage.uri}: {name} has sha256 {digest[:12]}…, the manifest says "
                f"{shard['sha256'][:12]}…: it is damaged or was changed; delete the folder and rebuild the dataset"
            )
        return file


def _write_header(file: HashedFile, kind: type, shape: tuple[int, ...]) -> None:
    """Write the header of an npy file whose content follows."""
    description = {"descr": np.lib.format.dtype_to_descr(np.dtype(kind)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(cast(IO[bytes], file), description)


def _advise(array: Any, advice: int, first: int, last: int) -> None:
    """Tell the kernel what is going to happen to rows [first, last) of a memory map."""
    width = array.strides[0]
    begin = array.offset + first * width
    start = begin - begin % mmap.PAGESIZE
    array.base.madvise(advice, start, array.offset + last * width - start)


def _tensor(array: NDArray[Any]) -> Tensor:
    """A tensor over the read-only map, without a copy. torch warns that writing to it is undefined; we only read."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
