"""Gradient buckets: views into a few flat buffers, each handed over for summing as soon as it is full (R2.3).

What `torch.nn.parallel.DistributedDataParallel` does, with less in each step. DDP either looks for parameters that have
no gradient, by a walk over the graph and a collective of its own in every step, or it refuses models that have some and
sorts its buckets anew after the first step: then the steps after a resume are not those of a run without one, bit for
bit. Here buckets stay as they are, and what has no gradient is found when the backward pass is over; that some have
none travels with the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

FIRST_BYTES, MOST_BYTES = 1 << 20, 25 << 20
"""Of the first bucket, which is small so that communication begins early, and of the others."""
WAITING = "waiting for the sums of gradients"
"""In traces (T5): the sums themselves happen on another thread."""


class Bucket:
    """Gradients of some parameters in one buffer. Behind them is one number for each parameter: 1 if this rank has no
    gradient for it, so that the sum says how many have none; what drops small values may drop these."""

    def __init__(self, number: int, parameters: Sequence[nn.Parameter], is_last: bool) -> None:
        self._number, self.parameters, self._is_last = number, parameters, is_last
        sizes = [parameter.numel() for parameter in parameters]
        first = parameters[0]
        self._buffer = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        self.gradients = self._buffer[: -len(sizes)]
        *parts, self.without = self._buffer.split([*sizes, len(sizes)])
        self.views = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]
        self.missing: set[int] = set()
        """Places of parameters whose gradient is not there yet…"""
        self.used: set[int] = set()
        """…and of those that had one in an earlier backward pass of the step."""

    def index(self) -> int:
        return self._number

    def buffer(self) -> Tensor:
        return self._buffer

    def is_last(self) -> bool:
        return self._is_last


class Buckets:
    """The buckets of a model's parameters. ``hand_over`` is given each full one, in the same order on all ranks, on the
    thread of autograd; its future says that the buffer holds the sum. A backward pass ends when all are summed."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], hand_over: Callable[[Bucket], Future[Any]], world_size: int
    ) -> None:
        self._hand_over, self._world_size = hand_over, world_size
        parts = divide(list(reversed(parameters)))  # about the order in which a backward pass comes to them
        self.buckets = [Bucket(number, part, number == len(parts) - 1) for number, part in enumerate(parts)]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket, place))
            for bucket in self.buckets
            for place, parameter in enumerate(bucket.parameters)
        ]
        self.summing = True
        """False: gradients only pile up."""
        self._under_way: list[Future[Any]] | None = None
        """Of this backward pass; None before its first gradient."""

    def clear(self) -> None:
        """Gradients are zero, and views of the buffers."""
        self._under_way = None
        for bucket in self.buckets:
            bucket.used.clear()
            bucket.buffer().zero_()
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view

    def detach(self) -> None:
        """Let go of the parameters; no gradient is a view any more."""
        for hook in self._hooks:
            hook.remove()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def _arrived(self, bucket: Bucket, place: int, _: Tensor) -> None:
        if not self.summing:
            bucket.used.add(place)
            return
        if self._under_way is None:
            self._under_way = []
            for item in self.buckets:
                item.missing = set(range(len(item.parameters)))
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        bucket.missing.discard(place)
        while len(self._under_way) < len(self.buckets) and not self.buckets[len(self._under_way)].missing:
            self._start(self.buckets[len(self._under_way)])

    def _start(self, bucket: Bucket) -> None:
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is not view:  # somebody else has set gradients to None or to a tensor of their own
                view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
                parameter.grad = view
        assert self._under_way is not None
        self._under_way.append(self._hand_over(bucket))

    def _finish(self) -> None:
        """The backward pass is over: whatever has no gradient has none."""
        assert self._under_way is not None
        for bucket in self.buckets[len(self._under_way) :]:
            for place in bucket.missing - bucket.used:
                bucket.without[place] = 1
            self._start(bucket)
        with record_function(WAITING) if torch.autograd._profiler_enabled() else nullcontext():
            for future in self._under_way:
                future.result()
        self._under_way = None
        for bucket in self.buckets:
            for place in bucket.missing - bucket.used:
                if round(float(bucket.without[place])) == self._world_size:
                    bucket.parameters[place].grad = None  # on no rank: the optimizer leaves it alone


def divide(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Consecutive parameters of one type, up to about `MOST_BYTES` together."""
    parts: list[list[nn.Parameter]] = []
    size, limit, kind = 0, FIRST_BYTES, None
    for parameter in parameters:
        if not parts or size + parameter.nbytes > limit or parameter.dtype != kind:
            limit = MOST_BYTES if parts else FIRST_BYTES
            parts.append([])
            size, kind = 0, parameter.dtype
        parts[-1].append(parameter)
        size += parameter.nbytes
    return parts
