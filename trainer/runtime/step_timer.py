"""The time of each step on this rank, divided into named segments without gaps, by this rank's own clock.

The segments sum to the time from the end of the last step to the end of this one:

    input        waiting for the batch
    forward      the model and the loss
    backward     the local computation of gradients: until this rank's last gradient bucket is handed over
    exposed      communication that nothing hides: from there until the gradients are summed, and the commit of the
                 step; `trainer.observability.comm_profiler` divides it into the network and waiting for slower ranks
    optimizer    clipping and the update
    checkpoint   time that saves since the last step have held up
    other        the rest: reports, votes, the turn of an epoch

Reports of a step, and the turn of an epoch before it, are part of the next step. Evaluation and regrouping belong to no
step.
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
    """The end of a segment. A segment of None is time that belongs to no step."""

    segment: Segment | None
    at: float
    """Seconds of `time.monotonic`, the clock of `trainer.comm.group.Collective`."""
    event: Any = None
    """On a GPU: an event, recorded when the GPU has done all work submitted so far."""


_new = tuple.__new__


def traced(name: str) -> AbstractContextManager[Any]:
    """Return a span of this name in traces; to check first whether a trace runs takes less than an unused span."""
    return record_function(name) if profiler._is_profiler_enabled else nullcontext()


class StepTimer:
    """A recorder of where segments end. It computes nothing: that is left to the end of the window.

    Marks come one after the other, though not all on one thread: autograd's thread marks the end of the local backward
    computation. On a GPU, which works on while the host is ahead, a mark is an event in its stream, read at the end of
    the window: nothing waits for it in a step. (That path has not been run on a GPU yet.)
    """

    def __init__(self, enabled: bool, device: torch.device) -> None:
        self.enabled = enabled
        self._on_gpu = device.type == "cuda"
        self._marks = [self._now(None)]

    def mark(self, segment: Segment | None) -> None:
        """Count the time since the last mark for this segment; for None it belongs to no step."""
        if self.enabled:
            # It runs a dozen times a step: without `_now` and `Mark.__new__` it takes half the time on the host.
            if self._on_gpu:
                self._marks.append(self._now(segment))
                return
            self._marks.append(_new(Mark, (segment, time.monotonic(), None)))

    def take(self) -> list[Mark]:
        """Return the marks of a step that is done. Its end is the start of the next one."""
        marks, last = self._marks, self._marks[-1]
        self._marks = [Mark(None, last.at, last.event)]
        return marks

    def drop(self) -> None:
        """Discard the marks of a step that is not done, and will be done again."""
        if self.enabled:
            self._marks = [self._now(None)]

    def _now(self, segment: Segment | None) -> Mark:
        if not self._on_gpu:
            return Mark(segment, time.monotonic())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return Mark(segment, time.monotonic(), event)


def moments(marks: Sequence[Mark]) -> list[float]:
    """Return when each mark of a step was reached, in seconds of `time.monotonic`; by the device's clock on a GPU."""
    if marks[-1].event is None:
        return [mark.at for mark in marks]
    marks[-1].event.synchronize()
    # The gradient's norm was read before the step was committed, so there the GPU had caught up with the host.
    number = max(number for number, mark in enumerate(marks) if mark.segment == "exposed")
    common = marks[number]
    before = [common.at - mark.event.elapsed_time(common.event) / 1000 for mark in marks[:number]]
    return before + [common.at + common.event.elapsed_time(mark.event) / 1000 for mark in marks[number:]]


def durations(marks: Sequence[Mark], moments: Sequence[float]) -> dict[Segment, float]:
    """Return the seconds of each segment of a step."""
    seconds = dict.fromkeys(SEGMENTS, 0.0)
    for mark, began, ended in zip(marks[1:], moments, moments[1:], strict=False):
        if mark.segment is not None:
            seconds[mark.segment] += ended - began
    return seconds


def computed_at(marks: Sequence[Mark], moments: Sequence[float]) -> float:
    """Return when this rank's own part of the backward pass was done; from then on, communication is exposed. Where
    there was none, as a batch of a caller's own loop may have none, that is from the start."""
    done = (at for mark, at in zip(marks, moments, strict=True) if mark.segment == "backward")
    return max(done, default=moments[0])
