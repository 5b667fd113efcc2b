"""`GradientSynchronizer`: gradients are summed over ranks while the backward pass still computes.

`trainer.parallel.buckets` hands each bucket over as soon as it is full; the communication thread sums them over ranks,
in order, as ``training.communication`` says (`trainer.parallel.compression`). The only bucket of a small model is
summed by the thread that trains, where it is not compressed and ranks have channels to each other
(`trainer.comm.socket_group`): nothing is left that it could overlap with. In parameter-server mode there are no
buckets: after the backward pass all gradients go to rank 0 and back, uncompressed, since that mode is the last
resort."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.comm.group import CollectiveResult, CompletedCollective, InterruptibleGroup, summed
from trainer.comm.torch_transport import Transport
from trainer.comm.world import World
from trainer.config import DistributedTrainingConfig
from trainer.parallel.buckets import Bucket, Buckets, divide
from trainer.runtime.fault_injection import Faults
from trainer.runtime.packages import load
from trainer.runtime.step_timer import StepTimer

Computing = Callable[[], AbstractContextManager[None]]


class CommHook:
    """Sums one bucket over ranks: exactly, by the transport's own all-reduce. Every other hook sums types other than
    float32 exactly, too."""

    def bytes_of(self, buffer: Tensor) -> int:
        """Return the bytes of a tensor whose plain all-reduce loads each rank's link as much as this hook does."""
        return buffer.nbytes

    def all_reduce(self, buffer: Tensor, bucket: int, step: int, transport: Any, computing: Computing) -> None:
        """Sum the buffer over ranks, in place, by a `trainer.comm.torch_transport.Transport`. ``bucket`` and
        ``step`` identify it; a step that is done again has the same number."""
        transport.all_reduce(buffer)


class GradientSync:
    """The way in which gradients of a step come together over the ranks of one world. Methods of a way that has nothing
    to do there are here."""

    def __init__(self, world: World, faults: Faults, timer: StepTimer) -> None:
        self.world, self.faults, self.timer = world, faults, timer
        self.step = 0
        self.on_last_bucket: Callable[[], object] | None = None
        """Called when the last bucket is handed over, where there are buckets: what it submits follows that bucket
        without a wait. The missing gradients are known by then."""

    def unwrap(self) -> None:
        """Make the model ready for another one, also where a pass has failed."""

    def abandon(self) -> None:
        """Make the model ready for another pass after one that has failed, where `clear` does not."""

    def clear(self, parameters: list[nn.Parameter]) -> None:
        """Clear the gradients before the first backward pass of a step, also those of one that has failed."""
        raise NotImplementedError

    def passes(self, samples: int, micro_batches: int, at_once: int) -> int:
        """Return how many passes every rank makes for a global batch of this many samples, where each is a collective;
        0 where ranks may make as many as they have work for."""
        return 0

    def begin_forward(self) -> None:
        """Prepare a forward pass."""

    def used_places(self) -> list[set[int]]:
        """Return which gradients of each bucket the passes of a step have written so far."""
        return []

    def note_used(self, places: list[set[int]]) -> None:
        """Count gradients as written, after a pass that called no hooks. ``places``: what `used_places` returned when
        it was recorded."""

    def require_sync(self, is_last: bool) -> None:
        """Prepare a backward pass, after the forward pass. ``is_last``: of the step."""
        raise NotImplementedError

    def finish(self, wrapped: nn.Module) -> None:
        """Wait for the sums after the last backward pass. Raise `trainer.comm.group.GroupError` if one has failed."""
        raise NotImplementedError

    @property
    def overlaps(self) -> bool:
        """Whether some gradients are summed while the last pass of a step still computes others."""
        return False

    def flat_gradients(self) -> list[Tensor] | None:
        """Return the tensors that hold all gradients of this rank after `finish`; None where parameters do."""
        return None

    def whole_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of the whole gradient, from that of what this rank holds. A collective where ranks hold
        parts."""
        return norm

    def missing_flags(self) -> list[int]:
        """Return the flags that ranks sum after `finish`, for `drop_unused`: 1 for each parameter that has no gradient
        here. There are none where those count as having one of zeros."""
        return []

    def drop_unused(self, ranks_without: list[int]) -> None:
        """Drop the gradients that no rank has, see `Buckets.drop_unused`."""


class GradientSynchronizer(GradientSync):
    """The sums of gradients over the ranks of one world. They are sums, not averages: the loss is scaled by the global
    batch, so the sum is the gradient of the mean over it.

    A new world has a new synchronizer, without the residuals of compression.
    """

    def __init__(
        self,
        world: World,
        faults: Faults,
        timer: StepTimer,
        config: DistributedTrainingConfig | None = None,
        at_end: bool = False,
    ) -> None:
        """``at_end``: gradients are summed after the backward passes, not while they compute."""
        super().__init__(world, faults, timer)
        self._at_end = at_end
        self.config = config or DistributedTrainingConfig()
        self._hook: CommHook
        self.buckets: Buckets | None = None
        self.is_in_place = self.config.compile == "reduce-overhead"
        """Whether gradients accumulate in the buffers even where there is one bucket. CUDA graphs need that: what they
        write is overwritten by their next run."""
        self._is_overlapped = False
        """Whether buckets are summed during the backward pass."""
        self._parameters: list[nn.Parameter] = []
        """Those that are trained, once the module is wrapped."""

    def wrap(self, module: nn.Module) -> None:
        """Sum the gradients of each later backward pass through this module over ranks. Its parameters must be equal on
        all ranks already. Waits for the group; raises `GroupError`."""
        group = self.world.group
        parameters = self._parameters = [each for each in module.parameters() if each.requires_grad]
        if group is None or self.world.topology == "star":
            if self.is_in_place:
                self.buckets = Buckets(parameters, _not_summed, in_place=True)
            return
        group.run("forming the group", _nothing)
        nodes = self.world.all_gather_object(self.world.facts.node_rank)
        self._hook = CommHook()
        if (name := self.config.communication) != "allreduce":
            self._hook = load("trainer.parallel.compression:make_comm_hook")(name, nodes, self.config.topk_fraction)
        self.buckets = Buckets(parameters, self._sum_bucket, self.is_in_place, self._at_end)
        self._is_overlapped = True

    def unwrap(self) -> None:
        """Remove the hooks from the module, if it was wrapped."""
        if self.buckets is not None:
            self.buckets.detach()

    def clear(self, parameters: list[nn.Parameter]) -> None:
        """Clear the gradients before the first backward pass of a step."""
        if self.buckets is not None:
            self.buckets.clear()
            return
        for parameter in parameters:
            parameter.grad = None

    def require_sync(self, is_last: bool) -> None:
        """Prepare a backward pass: all but a step's last accumulate without communication."""
        if self.buckets is not None:
            self.buckets.begin(is_last)

    def used_places(self) -> list[set[int]]:
        return [set(bucket.used) for bucket in self.buckets.buckets] if self.buckets is not None else []

    def note_used(self, places: list[set[int]]) -> None:
        if self.buckets is not None:
            for bucket, used in zip(self.buckets.buckets, places, strict=True):
                bucket.used |= used

    def finish(self, wrapped: nn.Module) -> None:
        """Wait for the sums after the last backward pass; in parameter-server mode, send the gradients to rank 0 and
        back."""
        group = self.world.group
        if self.buckets is not None:
            self.buckets.finish()
            if self._is_overlapped:
                self.timer.mark("exposed")
                return
            self.buckets.drop_unused(self.buckets.missing_flags(), 1)
        else:
            for parameter in self._parameters:  # as where there are buckets
                if (gradient := parameter.grad) is not None and gradient.is_sparse:
                    parameter.grad = gradient.to_dense()
        self.timer.mark("backward")
        if group is None:
            return
        self.faults.reach("all_reduce", self.step)
        used = torch.tensor([parameter.grad is not None for parameter in self._parameters], dtype=torch.int64)
        group.run("which gradients there are", partial(summed, used), used.nbytes)
        known = [parameter for parameter, count in zip(self._parameters, used.tolist(), strict=True) if count]
        for bucket, part in enumerate(divide(known)):
            grads = [torch.zeros_like(item) if item.grad is None else item.grad for item in part]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            group.run(_bucket_name(bucket, flat.nbytes), partial(summed, flat), flat.nbytes)
            at = 0
            for item, grad in zip(part, grads, strict=True):
                item.grad = grad.copy_(flat[at : at + grad.numel()].view_as(grad))
                at += grad.numel()
        self.timer.mark("exposed")

    @property
    def overlaps(self) -> bool:
        return self._is_overlapped and self.buckets is not None and len(self.buckets.buckets) > 1

    def flat_gradients(self) -> list[Tensor] | None:
        """Return the flat tensors that hold all gradients after `finish`; None where there are none."""
        if self.buckets is None or not (self._is_overlapped or self.world.group is None):
            return None
        return [bucket.buffer for bucket in self.buckets.buckets]

    def missing_flags(self) -> list[int]:
        """Return the flags that ranks sum after `finish`, for `drop_unused`: 1 for each parameter that has no gradient
        here."""
        return self.buckets.missing_flags() if self.buckets is not None and self._is_overlapped else []

    def drop_unused(self, ranks_without: list[int]) -> None:
        """Drop the gradients that no rank has, see `Buckets.drop_unused`."""
        if self.buckets is not None and self._is_overlapped:
            self.buckets.drop_unused(ranks_without, self.world.world_size)

    def _sum_bucket(self, bucket: Bucket) -> CollectiveResult:
        """Submit the sum of a bucket, on the thread of autograd, in the same order on all ranks."""
        if bucket.number == 0:
            self.faults.reach("all_reduce", self.step)
        if bucket.is_last:
            self.timer.mark("backward")  # the rest of the pass is up to the other ranks and the network
        assert self.world.group is not None
        outcome = self.submit_sum(bucket, self.world.group, _bucket_name(bucket.number, bucket.buffer.nbytes))
        if bucket.is_last and self.on_last_bucket is not None:
            self.on_last_bucket()
        return outcome

    def submit_sum(self, bucket: Bucket, group: InterruptibleGroup, what: str) -> CollectiveResult:
        """Submit the sum of a bucket over the ranks of the group. ``what`` names it."""
        hook, gradients = self._hook, bucket.buffer
        if type(hook) is CommHook and bucket.number == 0 and bucket.is_last:
            return group.all_reduce(what, gradients)
        work = partial(_sum_by, hook, gradients, bucket.number, self.step, group.computing)
        return group.submit(what, work, hook.bytes_of(gradients))


def _sum_by(hook: CommHook, buffer: Tensor, bucket: int, step: int, computing: Computing, transport: Any) -> None:
    hook.all_reduce(buffer, bucket, step, transport, computing)


def _nothing(_: Transport) -> None: ...


def _not_summed(_: Bucket) -> CollectiveResult:
    return CompletedCollective()


@lru_cache(maxsize=1024)
def _bucket_name(index: int, bytes_: int) -> str:
    return f"all-reduce of gradient bucket {index} ({bytes_:,} bytes)"
