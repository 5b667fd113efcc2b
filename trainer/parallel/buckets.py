"""Gradient buckets: views into a few flat buffers, each handed over for summing as soon as it is full.

They do what `torch.nn.parallel.DistributedDataParallel` does, with less work in each step. DDP either looks for
parameters without a gradient, by a walk over the graph and a collective of its own in every step, or it refuses models
that have some and reorders its buckets after the first step: then the steps after a resume are not those of an
uninterrupted run, bit for bit. Here buckets never change, and parameters without a gradient are found when the backward
pass is over; the caller sums these flags over ranks and passes them to `Buckets.drop_unused`.

A single bucket is full with the last gradient, so no hooks are needed: gradients stay where autograd puts them, and are
collected when the backward pass is over.

The backward pass ends when the outermost ``backward()`` returns. Autograd's own callbacks would not do: they come at
the end of the innermost one, which re-entrant checkpointing begins inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from trainer.comm.group import CollectiveResult
from trainer.config import ConfigError
from trainer.runtime.step_timer import traced

FIRST_BYTES, MOST_BYTES = 1 << 20, 25 << 20
"""Bytes of the first bucket, which is small so that communication begins early, and of the others."""
PIECE = 1 << 16
"""Elements of which torch takes a norm at once on a CPU. It adds up their squares in a few float32 numbers: of 65,536
elements the norm is right to 3e-7, of 6.5 million, as a bucket has, to 2e-4, and of 25 million to 1e-3."""
WAITING = "waiting for the sums of gradients"
"""The name of this span in traces: the sums themselves happen on another thread."""


class Bucket:
    """The gradients of some parameters in one buffer."""

    def __init__(self, number: int, parameters: Sequence[nn.Parameter], is_last: bool) -> None:
        self.number, self.parameters, self.is_last = number, parameters, is_last
        size, first = sum(parameter.numel() for parameter in parameters), parameters[0]
        self.buffer = torch.zeros(size, dtype=first.dtype, device=first.device)
        """The flat tensor that holds the gradients."""
        self.views = views(self.buffer, parameters)
        self.missing: set[int] = set()
        """Indices of the parameters whose gradient has not arrived yet."""
        self.used: set[int] = set()
        """Indices of the parameters that had a gradient before this backward pass."""


class Buckets:
    """The buckets of a model's parameters. ``hand_over`` is given each full one, in the same order on all ranks, on the
    thread of autograd; its result says that the buffer holds the sum. With ``in_place``, gradients accumulate in the
    buffers even where there is only one bucket.

    A step is `clear`, then for each backward pass `begin`, then `finish` and `drop_unused`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        hand_over: Callable[[Bucket], CollectiveResult],
        in_place: bool = False,
        at_end: bool = False,
    ) -> None:
        """``at_end``: gradients are collected when all backward passes are over, however many buckets there are."""
        self._hand_over = hand_over
        parts = divide(list(reversed(parameters)))  # about the order in which a backward pass comes to them
        self.buckets = [Bucket(number, part, number == len(parts) - 1) for number, part in enumerate(parts)]
        self._at_end = at_end or (len(parts) == 1 and not in_place)
        hooked = [] if self._at_end else self.buckets
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket, place))
            for bucket in hooked
            for place, parameter in enumerate(bucket.parameters)
        ]
        self._summing = False
        self._under_way: list[CollectiveResult] = []
        """Sums of this backward pass, or of one that failed."""

    def clear(self) -> None:
        """Set gradients to zero as views of the buffers, or to None where they are collected at the end."""
        self._let_go()
        for bucket in self.buckets:
            bucket.used.clear()
            if self._at_end:
                for parameter in bucket.parameters:
                    parameter.grad = None
                continue
            bucket.buffer.zero_()
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view

    def begin(self, summing: bool = True) -> None:
        """Prepare for a backward pass, in which gradients only accumulate, or are also summed as they arrive."""
        self._let_go()
        self._summing = summing
        if summing:
            for bucket in self.buckets:
                bucket.missing = set(range(len(bucket.parameters)))

    def finish(self) -> None:
        """End the backward pass, hand over the remaining buckets, and return when all are summed."""
        with traced(WAITING):
            for bucket in self.buckets[len(self._under_way) :]:
                self._start(bucket)
            for outcome in self._under_way:
                outcome.result()
        self._under_way.clear()
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view

    def missing_flags(self) -> list[int]:
        """Return one flag for each parameter, in the same order on all ranks: 1 where this rank has no gradient for it.
        They are known once the last bucket is handed over."""
        flags: list[int] = []
        for bucket in self.buckets:
            of_bucket = [0] * len(bucket.parameters)
            for place in bucket.missing - bucket.used:
                of_bucket[place] = 1
            flags += of_bucket
        return flags

    def drop_unused(self, ranks_without: Sequence[int], world_size: int) -> None:
        """Set to None each gradient that no rank has, so that the optimizer leaves the parameter alone.
        ``ranks_without`` is the sum of `missing_flags` over ranks."""
        parameters = (parameter for bucket in self.buckets for parameter in bucket.parameters)
        for parameter, count in zip(parameters, ranks_without, strict=True):
            if count == world_size:
                parameter.grad = None

    def detach(self) -> None:
        """Remove the hooks and all gradients from the parameters."""
        for hook in self._hooks:
            hook.remove()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def _let_go(self) -> None:
        """Wait until the sums of a failed pass no longer use the buffers."""
        for outcome in self._under_way:
            outcome.exception()
        self._under_way.clear()

    def _arrived(self, bucket: Bucket, place: int, _: Tensor) -> None:
        if not self._summing:
            bucket.used.add(place)
            return
        if place not in bucket.missing:
            raise RuntimeError(
                "a parameter got its gradient twice in one backward pass, the second time after it may have been sent: "
                "it is used in several parts of the model that are checkpointed re-entrantly. Call "
                "torch.utils.checkpoint.checkpoint with use_reentrant=False"
            )
        bucket.missing.remove(place)
        while len(self._under_way) < len(self.buckets) and not self.buckets[len(self._under_way)].missing:
            self._start(self.buckets[len(self._under_way)])

    def _start(self, bucket: Bucket) -> None:
        if self._at_end:
            bucket.missing.clear()
        for place, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
                if self._at_end:
                    bucket.missing.add(place)
            elif gradient is not view:
                view.copy_(gradient if gradient.layout is torch.strided else gradient.to_dense())
        self._under_way.append(self._hand_over(bucket))


def views(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a view of the flat tensor for each of these tensors, one after the other, with the strides that autograd
    would choose for its gradient: the tensor's own where it has no gaps. Fused optimizers walk through both as they lie
    in memory."""
    found = []
    for part, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        strides = torch.empty_like(tensor, device="meta").stride()  # keeps them where there are no gaps
        found.append(part.as_strided(tensor.size(), strides, part.storage_offset()))
    return found


def divide(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divide parameters into consecutive lists of one type, each up to about `MOST_BYTES`. Raise `ConfigError` where
    they are on several devices."""
    if len(devices := {parameter.device for parameter in parameters}) > 1:
        raise ConfigError(
            f"the model has parameters on {' and '.join(sorted(map(str, devices)))}: each rank trains on one device, "
            "so leave them where the trainer puts them"
        )
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


def gradient_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the Euclidean norm of all elements of these tensors together, a scalar: exact to the rounding of its type
    however many there are."""
    if device.type == "cpu":
        if gradients and sum(map(Tensor.numel, gradients)) <= PIECE:  # in a third of the time
            flat = [each if each.dim() == 1 else each.reshape(-1) for each in gradients]
            return torch.linalg.vector_norm(torch.cat(flat))
        gradients = [
            piece
            for tensor in gradients
            for piece in ((tensor,) if tensor.numel() <= PIECE else tensor.reshape(-1).split(PIECE))
        ]
    return nn.utils.get_total_norm(gradients)
