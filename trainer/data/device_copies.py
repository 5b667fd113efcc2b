"""Batches on their way to a GPU: copied from pinned memory in a stream beside the computation, which follows each copy.

The host waits for no copy. Which copies are begun when, and what waits for what, is `DeviceCopies`; what only a GPU can
do is `CudaCopyStream`, which **no GPU has run yet**: tests use a stand-in whose copies come as late or as early as may
be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.runtime.nested import map_leaves


class CopyStream(Protocol):
    """The interface of a stream of copies to a device."""

    def beside(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread's work goes into the stream."""
        ...

    def copy(self, part: Tensor) -> Tensor:
        """Submit the copy of a tensor of the host, and return what will have its values."""
        ...

    def record(self) -> Any:
        """Return an event that is done when all copies that were submitted so far are."""
        ...

    def follow(self, event: Any) -> None:
        """Let the work that this thread submits from now on begin after the event."""
        ...

    def keep(self, part: Tensor) -> None:
        """Let the memory of a copy go to no other one before the work is done that this thread has submitted by the
        time when the tensor is freed."""
        ...


class CudaCopyStream:
    """A stream of copies to one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def beside(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def copy(self, part: Tensor) -> Tensor:
        return part.pin_memory().to(self._device, non_blocking=True)

    def record(self) -> torch.cuda.Event:
        return self._stream.record_event()

    def follow(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def keep(self, part: Tensor) -> None:
        part.record_stream(torch.cuda.current_stream(self._device))


Started = tuple[Any, list[Tensor], Any]
"""A batch whose copy was submitted: the batch, its tensors that are copies, and the event that ends them."""


@dataclass(frozen=True, slots=True)
class DeviceCopies:
    """Copies of batches to a device."""

    stream: CopyStream

    def start(self, data: Any) -> Started:
        """Submit the copies of a batch, tensors in any structure. What is no plain tensor of the host stays as it
        is."""
        copied: list[Tensor] = []

        def copy(part: Any) -> Any:
            if type(part) is not Tensor or not part.is_cpu or part.layout is not torch.strided:
                return part
            copied.append(self.stream.copy(part))
            return copied[-1]

        with self.stream.beside():
            return map_leaves(copy, data), copied, self.stream.record()

    def take(self, started: Started) -> Any:
        """Return a batch whose copy was submitted: what this thread submits from now on may read it."""
        data, copied, event = started
        self.stream.follow(event)
        for part in copied:
            self.stream.keep(part)
        return data

    def ahead(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches as they are on the device; the copy of the next one is submitted before."""
        waiting: list[Started] = []
        for batch in batches:
            waiting.append(self.start(batch))
            if len(waiting) > 1:
                yield self.take(waiting.pop(0))
        if waiting:
            yield self.take(waiting.pop())
