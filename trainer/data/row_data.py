"""Rows of a table as the data of a training: Parquet shards, turned once into memory-mapped arrays.

A shard holds columns of numbers in deviations from their mean (float32; one that is missing is not a number),
categories as codes (int32): 0 for a missing or unknown value, then the values in the order of the manifest; and the
target, a number as it is (float64) or the code of a class. The arrays hold the same, codes as float32, which is exact
up to 2^24; `trainer.model.rows.RowInputs` turns them into what a model takes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.cached_arrays import SAMPLES, CachedArrays, advise, tensor_over
from trainer.data.manifest import STANDARDISED, DatasetError, split_ranges
from trainer.spec import REGRESSION, ROWS, row_spec_of


class RowData(CachedArrays):
    """The rows of one table: batches are pairs (stored rows (B, columns) float32, targets (B,))."""

    kind = ROWS

    def __init__(
        self, uri: str, cache_dir: str | os.PathLike[str] | None = None, expected_id: str | None = None
    ) -> None:
        """Open the table, and unpack it where no process of this node has. Raise `DatasetError` where it cannot be
        used."""
        super().__init__(uri, expected_id)
        self.spec = row_spec_of(self.manifest)
        self.open_arrays(cache_dir)
        self._features, self._target = (tensor_over(self._maps[name]) for name in SAMPLES)
        self._ranges = split_ranges(self.manifest)

    def count(self, split: str) -> int:
        """Return the number of rows of a split."""
        first, last = self._ranges[split]
        return last - first

    def samples(self, split: str, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the rows at these positions (B, columns) float32, and their targets (B,): float64, or int64 for
        classes."""
        index = torch.from_numpy(positions + self._ranges[split][0])
        if self.is_larger_than_memory:  # all at once, instead of page by page as the gather comes to them
            for row in index.tolist():
                self._read_ahead(row, row + 1)
        target = self._target.index_select(0, index)
        is_number = self.spec.task == REGRESSION
        return self._features.index_select(0, index), target if is_number else target.long()

    def original(self, split: str, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the rows at these positions (B, columns) as they were before they were standardised, to the precision
        in which they are stored."""
        rows = self.samples(split, positions)[0].double().numpy()
        return rows * np.array(self.spec.feature_std) + np.array(self.spec.feature_mean)  # 1 and 0 for a category

    def will_need(self, split: str, first: int, last: int) -> None:
        """Have the kernel read the rows at positions [first, last) into memory, without waiting for it."""
        offset = self._ranges[split][0]
        self._read_ahead(first + offset, last + offset)

    def content_digest(self) -> str:
        """Return the sha256 of what the arrays depend on: the digests, order and rows of the shards, the columns."""
        shards = [[shard["sha256"], shard["rows"]] for shard in self.manifest["shards"]]
        columns = [[column["name"], column["role"], column.get("values")] for column in self.manifest["columns"]]
        content = [ROWS, STANDARDISED, self.manifest["task"], shards, columns, None]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def array_shapes(self) -> dict[str, tuple[type, tuple[int, ...]]]:
        """Return the type and shape of each array."""
        kind = np.float64 if self.spec.task == REGRESSION else np.int32
        return {"features": (np.float32, (self.rows, len(self.spec.features))), "target": (kind, (self.rows,))}

    def read_shard(self, file: IO[bytes], shard: Mapping[str, Any]) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Yield the parts of each array, one row group at a time. Raise `DatasetError` for values that the manifest
        does not have: numbers that are missing where none may be, codes of no class or category."""
        import pyarrow.parquet as pq

        opened = pq.ParquetFile(file)
        if opened.metadata.num_rows != shard["rows"]:  # before it is unpacked
            raise self.miscounted(shard["rows"], opened.metadata.num_rows)
        spec = self.spec
        for group in range(opened.num_row_groups):
            table = opened.read_row_group(group)
            columns = [table.column(name).to_numpy() for name in spec.features]
            for name, values, categories, missing in zip(
                spec.features, columns, spec.categories, spec.may_miss, strict=True
            ):
                self._check_column(shard, name, values, len(categories), may_miss=missing or bool(categories))
                if categories and not (np.equal(np.mod(values, 1), 0) & (values >= 0)).all():
                    raise self._odd(shard, name)
            target = table.column(spec.target).to_numpy()
            self._check_column(shard, spec.target, target, len(spec.classes) - 1, may_miss=False)
            if spec.classes and target.dtype.kind not in "iu":
                raise self._odd(shard, spec.target)
            yield {"features": np.column_stack(columns).astype(np.float32), "target": target}

    def _check_column(
        self, shard: Mapping[str, Any], name: str, values: NDArray[Any], most: int, may_miss: bool
    ) -> None:
        """Raise `DatasetError` for a value that the manifest does not have. ``most``: the highest code, 0 or less for
        numbers."""
        if values.dtype.kind not in "fiu":
            raise self._odd(shard, name)
        if np.isinf(values).any() or (not may_miss and np.isnan(values).any()):
            raise self._odd(shard, name)
        if most > 0 and len(values) and not 0 <= values.min() <= values.max() <= most:
            raise self._odd(shard, name)

    def _odd(self, shard: Mapping[str, Any], name: str) -> DatasetError:
        return DatasetError(
            f"{self.storage.uri}: {shard['path']} has values in {name!r} that its manifest does not have; rebuild it"
        )

    def _read_ahead(self, first: int, last: int) -> None:
        for array in self._maps.values():
            advise(array, mmap.MADV_WILLNEED, first, last)
