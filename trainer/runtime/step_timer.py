"""Where the time of each step goes on this rank: named segments without gaps, by this rank's own clock.

Segments, which sum to the time from the end of the step before to the end of this one:

    input        waiting for the batch
    forward      the model and the loss
    backward     the local computation of gradients: until this rank's last gradient bucket is handed over
    exposed      communication that nothing hides: from there until the gradients are summed, and the commit of the
                 step; `trainer.observability.comm_profiler` divides it into the wire and waiting for slower ranks
    optimizer    clipping and the update
    checkpoint   what saves since the step before have held up
    other        the rest: reports, votes

Evaluation, regrouping and what is between epochs belong to no step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.autograd import profiler
from torch.profiler import record_function

Segment = Literal["input", "forward", "backward", "exposed", "optimizer", "checkpoint", "other"]
SEGMENTS: tuple[Segment, ...] = get_args(Segment)


class Mark(NamedTuple):
    """Where a segment ends. None is time that belongs to no step."""

    segment: Segment | None
    at: float
    """Seconds of `time.monotonic`, the clock of `trainer.comm.group.Collective`."""
    event: Any = None
    """On a GPU: when it has done all that was asked of it until here."""


_new = tuple.__new__


def traced(name: str) -> AbstractContextManager[Any]:
    """A span of this name in traces. To ask first takes less than a mark that nobody sees."""
    return record_function(name) if profiler._is_profiler_enabled else nullcontext()


class StepTimer:
    """Notes where segments end, and computes nothing: that is for the end of the window.

    Marks come one after the other, though not all on one thread: the end of the local backward computation is known to
    autograd's. On a GPU, which works on while the host is ahead, a mark is an event in its stream, read at the end of
    the window: nothing waits for it in a step. (That path has not been run on a GPU yet.)
    """

    def __init__(self, enabled: bool, device: torch.device) -> None:
        self.enabled = enabled
        self._on_gpu = device.type == "cuda"
        self._marks = [self._now(None)]

    def mark(self, segment: Segment | None) -> None:
        """The time since the mark before was spent on this; None: on no step."""
        if self.enabled:
            # A dozen times a step: on the host without the detours over `_now` and `Mark.__new__`, in half the time.
            self._marks.append(self._now(segment) if self._on_gpu else _new(Mark, (segment, time.monotonic(), None)))

    def take(self) -> list[Mark]:
        """The step is done: its marks. Its end is where the next one begins."""
        marks, last = self._marks, self._marks[-1]
        self._marks = [Mark(None, last.at, last.event)]
        return marks

    def drop(self) -> None:
        """The step is not done, and will be done again: what was noted of it does not count."""
        if self.enabled:
            self._marks = [self._now(None)]

    def _now(self, segment: Segment | None) -> Mark:
        if not self._on_gpu:
            return Mark(segment, time.monotonic())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return Mark(segment, time.monotonic(), event)


def moments(marks: Sequence[Mark]) -> list[float]:
    """When each mark of a step was reached, in seconds of `time.monotonic`: by the device, where that is a GPU."""
    if marks[-1].event is None:
        return [mark.at for mark in marks]
    marks[-1].event.synchronize()
    # The gradient's norm was read before the step was committed, so there the GPU had caught up with the host.
    number = max(number for number, mark in enumerate(marks) if mark.segment == "exposed")
    common = marks[number]
    before = [common.at - mark.event.elapsed_time(common.event) / 1000 for mark in marks[:number]]
    return before + [common.at + common.event.elapsed_time(mark.event) / 1000 for mark in marks[number:]]


def durations(marks: Sequence[Mark], moments: Sequence[float]) -> dict[Segment, float]:
    """Seconds of each segment of a step."""
    seconds = dict.fromkeys(SEGMENTS, 0.0)
    for mark, began, ended in zip(marks[1:], moments, moments[1:], strict=False):
        if mark.segment is not None:
            seconds[mark.segment] += ended - began
    return seconds


def computed_at(marks: Sequence[Mark], moments: Sequence[float]) -> float:
    """When this rank's own part of the backward pass was done; from here on, communication is exposed."""
    return max(at for mark, at in zip(marks, moments, strict=True) if mark.segment == "backward")
