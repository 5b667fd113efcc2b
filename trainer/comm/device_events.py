"""The order of work on a GPU, and when it is done, by events in the streams of threads.

A thread submits work to its stream and goes on; another thread's stream waits for an event of the first, and the host
does not. The one place at which a thread of this project waits for a GPU is `trainer.comm.group.InterruptibleGroup`.
**No machine with several GPUs has run this yet**: tests use a stand-in whose work completes late and out of order.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class DeviceEvents(Protocol):
    """The interface of what orders work on a device."""

    def record(self) -> Any:
        """Return an event that is done when all work that this thread has submitted so far is done."""
        ...

    def follow(self, event: Any) -> None:
        """Let the work that this thread submits from now on begin after the event. The thread itself goes on."""
        ...

    def is_done(self, event: Any) -> bool:
        """Return whether the event is done. Raise RuntimeError where the device has failed."""
        ...

    def seconds_between(self, first: Any, second: Any) -> float:
        """Return the seconds from one event that is done to another."""
        ...

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host that has the values once an event is done that is recorded after this call."""
        ...


class CudaEvents:
    """The events of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def follow(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def is_done(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def seconds_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return first.elapsed_time(second) / 1000

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
