"""The batches of data that is read by position from arrays of this node: rows of a table, pieces of a stream.

Which samples the next steps hold is worked out for some of them together; each step then gathers its own from the
memory map. On a GPU, and where the data is larger than memory, a thread does it ahead
(`trainer.data.loader.batches_ahead`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.comm.world import World
from trainer.data.batches import Batch, Samples, move_to
from trainer.data.coverage import digests
from trainer.data.loader import PLANNED, batches_ahead
from trainer.data.sampler import MicroBatch, Sampler
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer


class Positioned(Protocol):
    """The interface of data that this loader reads."""

    @property
    def is_larger_than_memory(self) -> bool:
        """Whether the arrays do not fit into what memory was free when they were opened."""
        ...

    def gather(self, split: str, positions: NDArray[np.int64]) -> Any:
        """Return the samples at these positions as one batch in memory."""
        ...

    def will_need(self, split: str, first: int, last: int) -> None:
        """Have the kernel read the samples at positions [first, last), without waiting for it."""
        ...


class PositionLoader:
    """The batches of one rank in one world."""

    def __init__(
        self, data: Positioned, sampler: Sampler, world: World, faults: Faults, timer: StepTimer,
        prefetch_batches: int | None,
    ) -> None:  # fmt: skip
        self.data, self.sampler, self.device, self.faults, self.timer = data, sampler, world.device, faults, timer
        self.ahead = batches_ahead(prefetch_batches, self.device, False, data.is_larger_than_memory)
        self._pool = (
            ThreadPoolExecutor(1, thread_name_prefix="gather", initializer=self._settle_thread) if self.ahead else None
        )
        self._pins = self.device.type == "cuda"

    def batches(self, epoch: int, offset: int, step: int) -> Iterator[Batch]:
        """Yield the batches of an epoch from position ``offset`` of it on. ``step``: the steps done by then."""
        dealt = self._deal(epoch, offset)
        coming: deque[Future[Batch]] = deque()
        for number in range(self.sampler.steps_from(offset)):
            self.timer.mark("other")
            self.faults.reach("input", step + number)
            if self._pool is None:
                batch = self._gather(*next(dealt))
            else:
                while len(coming) <= self.ahead and (order := next(dealt, None)) is not None:
                    coming.append(self._pool.submit(self._gather, *order))
                batch = coming.popleft().result()
            parts = (replace(part, data=move_to(part.data, self.device)) for part in batch.micro_batches)
            yield Batch(batch.samples, tuple(parts), batch.digest)

    def close(self) -> None:
        """End the gathering thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _deal(self, epoch: int, offset: int) -> Iterator[tuple[list[tuple[int, int]], int, list[MicroBatch], int]]:
        """Yield (ranges of samples to be read ahead, samples of the global batch, micro-batches of this rank, digest)
        of each step."""
        sampler = self.sampler
        for numbers in sampler.together(offset, PLANNED):
            for number, (samples, parts) in zip(numbers, sampler.steps(epoch, offset, numbers), strict=True):
                [digest] = digests(np.concatenate([part.positions for part in parts]), np.zeros(1, dtype=np.int64))
                ahead = sampler.ahead(epoch, offset, number) if self.data.is_larger_than_memory else []
                yield ahead, samples, parts, digest

    def _gather(
        self, ahead: list[tuple[int, int]], samples: int, parts: list[MicroBatch], digest: int
    ) -> Batch:  # fmt: skip
        for first, last in ahead:
            self.data.will_need("train", first, last)
        micro_batches = tuple(
            Samples(
                part.number,
                len(part.positions),
                self._pinned(self.data.gather("train", part.positions)),
                part.place,
                part.positions,
            )
            for part in parts
        )
        return Batch(samples, micro_batches, digest)

    def _pinned(self, data: Any) -> Any:
        return tuple(part.pin_memory() for part in data) if self._pins else data

    def _settle_thread(self) -> None:
        """The current GPU is each thread's own: without this, pinning would open a context on the first one."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
