"""The communication hooks by which a bucket of gradients is summed over ranks with fewer bytes, or over fewer links.

A `trainer.parallel.synchronizer.CommHook` works on the communication thread, on one bucket after the other, in the same
order on all ranks, and leaves the same bits on all of them. Its computation is timed apart from the network, see
`trainer.comm.group.InterruptibleGroup.computing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.parallel.synchronizer import CommHook, Computing
from trainer.performance.link import bytes_carried

SAMPLED, SPARE = 8192, 1.3
"""To find the largest entries, a threshold is estimated from about `SAMPLED` entries, so that about `SPARE` times the
wanted number pass it."""


class Hierarchical(CommHook):
    """A hook that sums exactly, within each node first, so that one rank of each node talks to other nodes."""

    def __init__(self, nodes: Sequence[int]) -> None:
        """``nodes`` holds the node of each rank."""
        self.nodes = nodes
        ranks, count = len(nodes), len(set(nodes))
        self._share = bytes_carried(count) / bytes_carried(ranks)

    def bytes_of(self, buffer: Tensor) -> int:
        """Return the bytes whose all-reduce over all ranks loads a link as much as this one over nodes does."""
        return round(self._share * buffer.nbytes)

    def all_reduce(self, buffer: Tensor, bucket: int, step: int, transport: Any, computing: Computing) -> None:
        """Sum the buffer over ranks, in place and exactly."""
        transport.hierarchical_all_reduce(buffer, self.nodes)


class FP16Compression(CommHook):
    """A hook that sends half precision and sums in single precision, in order of rank: half the bytes.

    Each rank sums one part of the bucket and passes it on. Each message has its own scale, a power of two that brings
    the largest entry near the top of what half precision holds: nothing overflows, and nothing vanishes that is larger
    than 2^-38 of the largest. Entries that are not finite arrive as such.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def bytes_of(self, buffer: Tensor) -> int:
        """Return the bytes of the packed rows; those of the buffer where it is not float32."""
        return buffer.nbytes if buffer.dtype != torch.float32 else 2 * self.ranks * self._length(buffer)

    def all_reduce(self, buffer: Tensor, bucket: int, step: int, transport: Any, computing: Computing) -> None:
        """Sum the buffer over ranks, in place; exactly where it is not float32."""
        if buffer.dtype != torch.float32:
            return transport.all_reduce(buffer)
        with computing():
            rows = buffer.new_zeros(self.ranks, self._length(buffer) - 2)
            rows.view(-1)[: buffer.numel()] = buffer
            mine, theirs = _as_half(rows), rows.new_empty(self.ranks, self._length(buffer), dtype=torch.float16)
        transport.all_to_all(theirs, mine)
        with computing():
            total = rows.new_zeros(1, rows.shape[1])
            for row in _as_single(theirs):
                total += row
            part = _as_half(total)
        transport.all_gather(theirs, part)
        with computing():
            buffer.copy_(_as_single(theirs).view(-1)[: buffer.numel()])

    def _length(self, buffer: Tensor) -> int:
        """Return the length of a rank's part with its scale; even, so that scales are aligned as a float32."""
        part = -(-buffer.numel() // self.ranks)
        return part + part % 2 + 2


def _as_half(rows: Tensor) -> Tensor:
    """Return rows of half precision, each after the scale that all of them share (float32, in the place of two)."""
    largest = rows.abs().max()
    _, exponent = torch.frexp(largest)
    usual = torch.isfinite(largest) & (largest > 0)
    scale = torch.ldexp(torch.ones_like(largest), torch.where(usual, 15 - exponent, 0).clamp(-100, 100))
    packed = rows.new_empty(len(rows), rows.shape[1] + 2, dtype=torch.float16)
    packed[:, :2] = scale.view(1).view(torch.float16)
    packed[:, 2:] = rows * scale
    return packed


def _as_single(packed: Tensor) -> Tensor:
    scales = packed.view(torch.float32)[:, :1]
    return packed[:, 2:].float() / scales


class TopKCompression(CommHook):
    """A hook that sends the largest entries of each bucket and adds the rest to the next step's gradient (error
    feedback).

    The residual is this rank's own and is in no checkpoint: a resume and a regroup begin without it. It is committed
    once its step is done, so a step that is done again starts from the same residual.
    """

    def __init__(self, ranks: int, fraction: float) -> None:
        self.ranks, self.fraction = ranks, fraction
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._next: dict[tuple[int, int], tuple[int, Tensor]] = {}
        """The residual that a step has left, with that step; by bucket and size."""

    def bytes_of(self, buffer: Tensor) -> int:
        """Return the bytes of the plain all-reduce that loads a link as much as the all-gather of the chosen
        entries."""
        # An all-gather loads a link with (ranks - 1) times what each rank gives, an all-reduce with
        # 2 (ranks - 1) / ranks times its tensor.
        return buffer.nbytes if buffer.dtype != torch.float32 else 4 * self._count(buffer) * self.ranks

    def all_reduce(self, buffer: Tensor, bucket: int, step: int, transport: Any, computing: Computing) -> None:
        """Sum the chosen entries of all ranks into the buffer; sum exactly where it is not float32."""
        if buffer.dtype != torch.float32:
            return transport.all_reduce(buffer)
        count = self._count(buffer)
        with computing():
            total = self._with_what_was_kept(buffer, bucket, step)
            chosen = largest(total, count)
            message = torch.cat([chosen.to(torch.int32), total[chosen].view(torch.int32)])
            messages = message.new_empty(self.ranks, 2 * count)
        transport.all_gather(messages, message)
        with computing():
            buffer.zero_()
            for row in messages:  # in order of rank: all get the same bits
                buffer.index_add_(0, row[:count], row[count:].view(torch.float32))
            if torch.isfinite(messages[:, count:].view(torch.float32)).all():  # else nothing comes of this step
                total[chosen] = 0.0
                self._next[bucket, buffer.numel()] = step, total

    def _with_what_was_kept(self, buffer: Tensor, bucket: int, step: int) -> Tensor:
        key = bucket, buffer.numel()
        if key in self._next and self._next[key][0] != step:
            self._kept[key] = self._next.pop(key)[1]
        return buffer + self._kept[key] if key in self._kept else buffer.clone()

    def _count(self, buffer: Tensor) -> int:
        return max(1, round(self.fraction * buffer.numel()))


def largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the ``count`` largest magnitudes; NaN counts as largest."""
    sizes = values.abs()
    if values.is_cuda or len(sizes) < 4 * SAMPLED or SPARE * count > len(sizes) / 2:
        return sizes.topk(count, sorted=False).indices
    # On a CPU, topk of many takes several times as long as one pass over all and topk of few.
    sample = sizes[:: len(sizes) // SAMPLED]
    place = max(1, round(len(sample) * (1 - SPARE * count / len(sizes))))
    candidates = (~(sizes < sample.kthvalue(place).values)).nonzero().view(-1)
    if len(candidates) < count:  # the sample was not like the rest
        return sizes.topk(count, sorted=False).indices
    return candidates[sizes[candidates].topk(count, sorted=False).indices]


def make_comm_hook(name: str, nodes: Sequence[int], fraction: float) -> CommHook:
    """Return the hook that ``training.communication`` names. ``nodes`` holds the node of each rank."""
    if name == "fp16":
        return FP16Compression(len(nodes))
    if name == "topk":
        return TopKCompression(len(nodes), fraction)
    return Hierarchical(nodes) if name == "hierarchical" and 1 < len(set(nodes)) < len(nodes) else CommHook()
