"""A dataset of windows as a node sees it: verified Parquet shards, turned once into memory-mapped arrays, gathered in
batches.

Windows are never stored. A sample is the row where its window ends; a batch of windows is one vectorised gather from
the memory map, without a Python object per sample. How shards become arrays is `trainer.data.cached_arrays`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.cached_arrays import CachedArrays, advise, tensor_over
from trainer.data.manifest import DatasetError, content_digest
from trainer.spec import WINDOWS, spec_of

__all__ = ["DataShardManager", "DatasetError"]


class DataShardManager(CachedArrays):
    """One dataset of windows: batches are pairs (raw windows (B, W, F), targets (B,) or (B, 2)), float32. The arrays
    are shared by all processes of a node through the page cache."""

    kind = WINDOWS

    def __init__(
        self, uri: str, cache_dir: str | os.PathLike[str] | None = None, expected_id: str | None = None
    ) -> None:
        super().__init__(uri, expected_id)
        columns = self.manifest["columns"]
        self._features = [column["name"] for column in columns if column["role"] == "feature"]
        [self._target] = [column["name"] for column in columns if column["role"] == "target"]
        self._extra = [column["name"] for column in columns if column["role"] in ("auxiliary", "price")]
        self.tickers_by_code = sorted({ticker for shard in self.manifest["shards"] for ticker in shard["tickers"]})
        self.spec = spec_of(self.manifest)
        self.open_arrays(cache_dir)
        rows, width = self._maps["features"].shape
        window = self.spec.window
        self._flat = tensor_over(self._maps["features"]).view(-1)
        self._windows = self._flat.as_strided((rows - window + 1, window * width), (width, 1))
        self._targets = tensor_over(self._maps["target"])
        self._second_name: str | None = None
        self._second: Tensor | None = None
        self._ranges = {split: self._sample_ranges(split) for split in self.manifest["splits"]}
        self._device_ranges: dict[str, list[Tensor]] = {}

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
        advise(self._maps["features"], mmap.MADV_WILLNEED, first - self.spec.window + 1, last)
        advise(self._maps["target"], mmap.MADV_WILLNEED, first, last)

    def add_target(self, name: str) -> None:
        """Stack a stored column to the target: from now on `gather` returns targets (B, 2). Raise `DatasetError` where
        there is no such column."""
        if name not in self._extra:
            raise DatasetError(
                f"{self.storage.uri} has no column {name}, which the loss needs in addition to the target: build the "
                "dataset with it, or take another loss, such as student_t"
            )
        self._second_name, self._second = name, tensor_over(self._maps[name])
        if self.device.type != "cpu":
            self._second = self._second.to(self.device, self._targets.dtype)
        if self.is_larger_than_memory:
            advise(self._maps[name], mmap.MADV_RANDOM, 0, self.rows)

    @property
    def targets(self) -> tuple[str, ...]:
        """The columns that targets are made of."""
        return (self._target,) if self._second_name is None else (self._target, self._second_name)

    @property
    def sample_bytes(self) -> int:
        """The bytes of all features and targets."""
        second = 0 if self._second is None else self._targets.nbytes
        return self._flat.nbytes + self._targets.nbytes + second

    def keep_on(self, device: torch.device) -> None:
        """Copy features and targets to this device; from now on, windows are gathered there."""
        self._targets, self._flat = self._targets.to(device, copy=True), self._flat.to(device, copy=True)
        self.device, self._device_ranges = self._targets.device, {}
        self._windows = self._flat.as_strided(self._windows.shape, self._windows.stride())
        if self._second is not None:
            self._second = self._second.to(device, self._targets.dtype)
        self.is_larger_than_memory = False  # it is not, there

    def samples(self, split: str, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the windows at these positions, and their targets, as `gather`."""
        return self.gather(self.end_rows(split, positions))

    def samples_on_device(self, split: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same for positions on `device`."""
        if split not in self._device_ranges:
            self._device_ranges[split] = [torch.from_numpy(each).to(self.device) for each in self._ranges[split]]
        starts, edges = self._device_ranges[split]
        index = torch.searchsorted(edges, positions, right=True) - 1
        return self._gather(starts[index] + (positions - edges[index]))

    def gather(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the windows that end in ``rows`` (B,): raw features (B, W, F) float32, and targets (B,) float32, or
        (B, 2) after `add_target`; on `device`."""
        return self._gather(torch.from_numpy(np.asarray(rows, dtype=np.int64)).to(self.device))

    def _gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        spec = self.spec
        if self.is_larger_than_memory:  # all at once, instead of page by page as the gather comes to them
            for row in index.tolist():
                self._read_ahead(row, row + 1)
        windows = self._windows.index_select(0, index - (spec.window - 1))
        target = self._targets.index_select(0, index)
        if self._second is not None:
            target = torch.stack((target, self._second.index_select(0, index).to(target.dtype)), -1)
        return windows.view(len(index), spec.window, len(spec.features)), target

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

    def content_digest(self) -> str:
        """Return the sha256 of what the arrays depend on."""
        return content_digest(self.manifest)

    def array_shapes(self) -> dict[str, tuple[type, tuple[int, ...]]]:
        """Return the type and shape of each array."""
        kinds: dict[str, type] = {"features": np.float32, "target": np.float32, "ticker": np.int32, "date": np.int32}
        kinds |= dict.fromkeys(self._extra, np.float64)
        rows, width = self.rows, len(self._features)
        return {name: (kind, (rows, width) if name == "features" else (rows,)) for name, kind in kinds.items()}

    def read_shard(self, file: IO[bytes], shard: Mapping[str, Any]) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Yield the parts of each array, one row group (a ticker's history) at a time."""
        import pyarrow.parquet as pq

        code = {ticker: number for number, ticker in enumerate(self.tickers_by_code)}
        opened = pq.ParquetFile(file)
        if opened.metadata.num_rows != shard["rows"]:  # before it is unpacked
            raise self.miscounted(shard["rows"], opened.metadata.num_rows)
        for group in range(opened.num_row_groups):
            yield self._columns_of(opened.read_row_group(group), code)

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
