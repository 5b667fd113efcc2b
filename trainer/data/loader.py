"""`BatchLoader` gathers the batches of training steps as a whole, without Python per sample.

Which samples belong to the next few steps is worked out for all of them together. Then there are three ways:

- On a CPU, windows are gathered from the memory map by the step itself. A thread that does it ahead shares the rank's
  core, and every hand-over between the two costs more than the gather (`batches_ahead`).
- Where features and targets fit into the GPU's memory they are kept there (`fits_on_device`), and a batch is one
  kernel.
- Else a thread gathers into pinned memory, used over and over, from which batches are copied in a stream of their own
  while the GPU computes (`Staging`).

The two ways of a GPU are tested on the CPU's own streams and events, which wait for nothing; they have not been run on
a GPU yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.comm.world import World
from trainer.data.batches import Batch, Samples
from trainer.data.coverage import digests
from trainer.data.sampler import SMALLEST, MicroBatch, Sampler
from trainer.data.shards import DataShardManager
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer

PLANNED = 1 << 13
"""Samples of this rank that are worked out together, about."""
RESIDENT_SHARE = 0.25
"""The share of a GPU's free memory that the data may take: the model, its gradients and activations come after it."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The samples of a batch, before they are gathered."""

    samples: int
    parts: list[MicroBatch]
    rows: Tensor
    """(b,) int64, where windows are gathered."""
    digest: int
    ahead: list[tuple[int, int]]
    """Samples [first, last) that the kernel should read meanwhile."""


def batches_ahead(given: int | None, device: torch.device, resident: bool, larger_than_memory: bool) -> int:
    """Return how many batches a thread gathers ahead (``training.prefetch_batches``, if given). It is 0 if the device
    holds the data, and on a CPU, where it costs more than it saves, unless the data is larger than memory."""
    if resident:
        return 0
    if given is not None:
        return given
    return 1 if device.type != "cpu" or larger_than_memory else 0


def fits_on_device(data_bytes: int, free_bytes: int) -> bool:
    """Return whether features and targets fit into `RESIDENT_SHARE` of a device's free memory, in bytes."""
    return data_bytes <= RESIDENT_SHARE * free_bytes


def keep_on_gpu(shards: DataShardManager, device: torch.device) -> None:
    """Keep the data on this GPU, if it fits."""
    if device.type == "cuda" and fits_on_device(shards.sample_bytes, torch.cuda.mem_get_info(device)[0]):
        shards.keep_on(device)


class Staging:
    """Host memory (pinned, for a GPU) from which batches are copied to the device in a stream of their own.

    A slot holds one batch in both memories. Its host side is free again when the copy is done, its device side when
    the step that used it is: `take` and `release` note that in the stream that computes, and nobody waits on the host
    unless the copy that used the same memory is still under way.
    """

    def __init__(self, shards: DataShardManager, device: torch.device, slots: int, samples: int) -> None:
        """``samples``: of the largest batch."""
        self.shards, self.device = shards, device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream()
        spec, pinned = shards.spec, device.type == "cuda"
        target = (samples,) if len(shards.targets) == 1 else (samples, len(shards.targets))
        shapes = ((samples, spec.window, len(spec.features)), target)
        self._host = [tuple(torch.empty(shape, pin_memory=pinned) for shape in shapes) for _ in range(slots)]
        self._there = [tuple(torch.empty(shape, device=device) for shape in shapes) for _ in range(slots)]
        self._copied, self._used = ([self._module.Event() for _ in range(slots)] for _ in range(2))
        for slot in range(slots):  # what computes may still be at work in memory that was free for these
            self.release(slot)

    def fill(self, slot: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Gather a batch, start its copy, and return its windows and targets on the device. One thread at a time."""
        count = len(rows)
        self._copied[slot].synchronize()
        host = self._host[slot]
        self.shards.gather(rows, (host[0][:count], host[1][:count]))
        with self._module.stream(self._stream):
            self._stream.wait_event(self._used[slot])
            windows, target = (
                there[:count].copy_(here[:count], non_blocking=True)
                for there, here in zip(self._there[slot], host, strict=True)
            )
            self._copied[slot].record(self._stream)
        return windows, target

    def take(self, slot: int) -> None:
        """Make the computing stream wait for the copy of this slot."""
        self._module.current_stream().wait_event(self._copied[slot])

    def release(self, slot: int) -> None:
        """Mark the slot as free once the computing stream has done its work so far."""
        self._used[slot].record(self._module.current_stream())

    def close(self) -> None:
        """Wait for all copies, so that their memory may be freed."""
        for event in self._copied:
            event.synchronize()


class BatchLoader:
    """An iterator over the batches of this rank."""

    def __init__(
        self, shards: DataShardManager, sampler: Sampler, world: World, faults: Faults, timer: StepTimer,
        prefetch_batches: int | None = None,
    ) -> None:  # fmt: skip
        self.shards, self.sampler, self.world, self.faults, self.timer = shards, sampler, world, faults, timer
        device = world.device
        resident = shards.device.type == device.type != "cpu"
        self.ahead = batches_ahead(prefetch_batches, device, resident, shards.is_larger_than_memory)
        self._pool = (
            ThreadPoolExecutor(1, thread_name_prefix="gather", initializer=self._settle_thread) if self.ahead else None
        )
        self._staging: Staging | None = None
        self._slots, self._next = self.ahead + 2, 0
        if shards.device.type != device.type:
            self.stage()

    def stage(self) -> None:
        """Allocate staging memory, from which batches are copied to the device."""
        sampler = self.sampler
        parts = sampler.micro_batches
        samples = sampler.global_batch_size + SMALLEST * parts  # of a last batch, which a remainder has joined
        largest = -(-samples // parts) * -(-parts // sampler.world_size)
        self._staging = Staging(self.shards, self.world.device, self._slots, largest)

    def batches(self, epoch: int, offset: int, step: int) -> Iterator[Batch]:
        """Yield the batches of an epoch from position ``offset`` of it on. ``step``: the steps done by then."""
        coming: deque[Future[tuple[Batch, int]]] = deque()
        planned = self._plan(epoch, offset)
        for number in range(self.sampler.steps_from(offset)):
            self.timer.mark("other")
            self.faults.reach("input", step + number)
            if self._pool is None:
                batch, slot = self._gather(next(planned))
            else:
                while len(coming) <= self.ahead and (wanted := next(planned, None)) is not None:
                    coming.append(self._pool.submit(self._gather, wanted))
                batch, slot = coming.popleft().result()
            if self._staging is None:
                yield batch
                continue
            self._staging.take(slot)
            yield batch
            self._staging.release(slot)

    def close(self) -> None:
        """End the gathering thread and wait for all copies."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)  # what is being gathered right now ends first
        if self._staging is not None:
            self._staging.close()

    def _settle_thread(self) -> None:
        """The current GPU is each thread's own: without this, pinning would open a context on the first one."""
        if self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)

    def _gather(self, planned: Planned) -> tuple[Batch, int]:
        """A batch, and its slot where it is staged."""
        for first, last in planned.ahead:
            self.shards.will_need("train", first, last)
        slot = self._next
        if self._staging is None:
            windows, target = self.shards.gather(planned.rows)
        else:
            self._next = (slot + 1) % self._slots
            windows, target = self._staging.fill(slot, planned.rows)
        parts = planned.parts
        if len(parts) == 1:
            only = Samples(parts[0].number, len(target), (windows, target), parts[0].place, parts[0].positions)
            return Batch(planned.samples, (only,), planned.digest), slot
        sizes = [len(part.positions) for part in parts]
        micro_batches = tuple(
            Samples(part.number, len(data[1]), data, part.place, part.positions)
            for part, *data in zip(parts, windows.split(sizes), target.split(sizes), strict=True)
        )
        return Batch(planned.samples, micro_batches, planned.digest), slot

    def _plan(self, epoch: int, offset: int) -> Iterator[Planned]:
        """Yield the steps from a position of the epoch on, which are dealt some at once."""
        sampler, reads_ahead = self.sampler, self.shards.device.type == "cpu"
        for numbers in sampler.together(offset, PLANNED):
            dealt = sampler.steps(epoch, offset, numbers)
            positions = np.concatenate([part.positions for _, parts in dealt for part in parts])
            lengths = [sum(len(part.positions) for part in parts) for _, parts in dealt]
            starts = np.concatenate([[0], np.cumsum(lengths[:-1])]).astype(np.int64)
            rows = torch.from_numpy(self.shards.end_rows("train", positions)).to(self.shards.device)
            found = zip(numbers, dealt, rows.split(lengths), digests(positions, starts), strict=True)
            for number, (samples, parts), of_rows, used in found:
                ahead = sampler.ahead(epoch, offset, number, is_first=not number) if reads_ahead else []
                yield Planned(samples, parts, of_rows, used, ahead)
