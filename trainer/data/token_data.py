"""A stream of tokens as the data of a training: shards of ids, joined once per node into one memory-mapped array.

A shard holds ids alone, little-endian, 16 bits each for a vocabulary of up to 65,536 and 32 above. A sample is a piece
of ``context`` ids with the one after it; pieces follow each other without overlap, so each token is predicted once in
an epoch.
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

from trainer.comm.world import World
from trainer.data.cached_arrays import CachedArrays, advise
from trainer.data.kinds import id_bytes, split_ranges, windows_in
from trainer.data.manifest import DatasetError
from trainer.data.position_loader import PositionLoader
from trainer.data.sampler import Sampler
from trainer.runtime.fault_injection import Faults
from trainer.runtime.host_memory import available_bytes
from trainer.runtime.step_timer import StepTimer
from trainer.spec import TOKENS, token_spec_of

_READ = 1 << 22
"""Bytes of a shard that are read at once."""


class TokenData(CachedArrays):
    """The pieces of one stream: batches are pairs (ids (B, context), the ids that follow each (B, context)), int64."""

    kind = TOKENS

    def __init__(
        self, uri: str, cache_dir: str | os.PathLike[str] | None = None, expected_id: str | None = None
    ) -> None:
        """Open the stream, and unpack it where no process of this node has. Raise `DatasetError` where it cannot be
        used."""
        super().__init__(uri, expected_id)
        self.spec = token_spec_of(self.manifest)
        self.folder, maps = self.open_arrays(cache_dir)
        self._ids = maps["tokens"]
        self.is_larger_than_memory = self._ids.nbytes > available_bytes()
        if self.is_larger_than_memory:  # each piece would bring in its neighbours, and push others out
            advise(self._ids, mmap.MADV_RANDOM, 0, self.rows)
        self._ranges = split_ranges(self.manifest)
        self._piece = np.arange(self.spec.context + 1)

    @property
    def dataset_id(self) -> str:
        """The dataset's id, from its manifest."""
        return self.spec.dataset_id

    def count(self, split: str) -> int:
        """Return the number of pieces of a split."""
        first, last = self._ranges[split]
        return windows_in(last - first, self.spec.context)

    def gather(self, split: str, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the pieces at these positions (B, context), and the ids that follow each of their ids, int64."""
        starts = self._ranges[split][0] + positions * self.spec.context
        if self.is_larger_than_memory:  # all at once, instead of page by page as the gather comes to them
            for start in starts.tolist():
                advise(self._ids, mmap.MADV_WILLNEED, start, start + len(self._piece))
        found = torch.from_numpy(self._ids[starts[:, None] + self._piece].astype(np.int64))
        return found[:, :-1], found[:, 1:]

    def stream(self, split: str, first: int, last: int) -> NDArray[np.int64]:
        """Return the ids at places [first, last) of a split's stream."""
        begin = self._ranges[split][0]
        return np.asarray(self._ids[begin + first : begin + last], dtype=np.int64)

    def tokens(self, split: str) -> int:
        """Return the number of ids of a split."""
        first, last = self._ranges[split]
        return last - first

    def read(self, split: str, positions: NDArray[np.int64], device: torch.device) -> Any:
        """Return the pieces at these positions, and what follows, on the device."""
        return tuple(part.to(device) for part in self.gather(split, positions))

    def will_need(self, split: str, first: int, last: int) -> None:
        """Have the kernel read the pieces at positions [first, last) into memory, without waiting for it."""
        begin, context = self._ranges[split][0], self.spec.context
        advise(self._ids, mmap.MADV_WILLNEED, begin + first * context, begin + last * context + 1)

    def make_loader(
        self, sampler: Sampler, world: World, faults: Faults, timer: StepTimer, prefetch_batches: int | None
    ) -> PositionLoader:
        """Return the loader of this rank's pieces."""
        return PositionLoader(self, sampler, world, faults, timer, prefetch_batches)

    def close(self) -> None:
        """There is nothing to end: each loader ends its own thread."""

    def content_digest(self) -> str:
        """Return the sha256 of what the array depends on: the digests, order and sizes of the shards."""
        shards = [[shard["sha256"], shard["rows"]] for shard in self.manifest["shards"]]
        return hashlib.sha256(json.dumps([TOKENS, self.manifest["vocabulary"], shards]).encode()).hexdigest()

    def array_shapes(self) -> dict[str, tuple[type, tuple[int, ...]]]:
        """Return the type and shape of the array."""
        return {"tokens": (np.uint16 if id_bytes(self.spec.vocabulary) == 2 else np.uint32, (self.rows,))}

    def read_shard(self, file: IO[bytes], shard: Mapping[str, Any]) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Yield the ids of a shard, some megabytes at a time. Raise `DatasetError` for an id outside the vocabulary,
        and for another number of ids than the manifest says."""
        width = id_bytes(self.spec.vocabulary)
        if (size := os.fstat(file.fileno()).st_size) != width * shard["rows"]:
            raise self.miscounted(shard["rows"], size // width)
        while piece := file.read(_READ):
            ids = np.frombuffer(piece, dtype=f"<u{width}")
            if ids.max() >= self.spec.vocabulary:
                raise DatasetError(
                    f"{self.storage.uri}: {shard['path']} has the id {ids.max()}, but its manifest gives a "
                    f"vocabulary of {self.spec.vocabulary}; rebuild it"
                )
            yield {"tokens": ids}
