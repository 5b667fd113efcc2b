"""`GradientSynchronizer`: gradients are summed over ranks while the backward pass still computes.

`trainer.parallel.buckets` hands each bucket over as soon as it is full; the communication thread sums them over ranks,
in order, as ``training.communication`` says (`trainer.parallel.compression`). The only bucket of a small model is
summed as it is by the thread that trains, where ranks have direct links (`trainer.comm.peer_to_peer`): there is nothing
left that it could overlap with. In parameter-server mode there are none: when the backward pass is done, all
gradients go to rank 0 and back, as they are, for that mode is there when nothing else works.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainer.comm.group import CollectiveResult, CompletedCollective
from trainer.comm.torch_transport import Transport
from trainer.comm.world import World
from trainer.config import DistributedTrainingConfig
from trainer.parallel.auto_compression import Automatic
from trainer.parallel.buckets import Bucket, Buckets, divide
from trainer.parallel.compression import CommHook, Computing, NoCompression, check_compression, make_comm_hook
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer

if TYPE_CHECKING:
    from trainer.observability.comm_profiler import TimingWindow


class GradientSynchronizer:
    """Sums, not averages: the loss is scaled by the global batch, so the sum is the gradient of the mean over it.

    It belongs to one world; a new one begins without what compression has kept back.
    """

    def __init__(
        self, world: World, faults: Faults, timer: StepTimer, config: DistributedTrainingConfig | None = None
    ) -> None:  # fmt: skip
        self.world, self.faults, self.timer = world, faults, timer
        self.config = config or DistributedTrainingConfig()
        self.step = 0
        self._nodes: list[int] = []
        self._hook: CommHook
        self._automatic: Automatic | None = None
        self.buckets: Buckets | None = None
        self._is_overlapped = False
        """Are the buckets what is summed?"""
        self._is_flat = False
        """Can all ranks use gradients in one piece?"""
        self._pass = -1
        """Autograd's number of the latest backward pass, where `sum_each_pass` minds them."""
        self.on_last_bucket: Callable[[], object] | None = None
        """Called when the last bucket was handed over: what it submits comes right after that, without a wait. By then
        it is known what has no gradient."""
        check_compression(self.config)

    def wrap(self, module: nn.Module, flat: bool = False) -> None:
        """From now on, a backward pass through this module sums its gradients over ranks. Its parameters must be equal
        on all ranks already. ``flat``: this rank can use gradients in one piece, so have them also where there is
        nothing to sum. Waits for the group; raises `GroupError`."""
        group = self.world.group
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # CUDA graphs give gradients in memory that their next run writes to, so they need a place of their own.
        in_place = self.config.compile == "reduce-overhead"
        if group is None or self.world.topology == "star":
            self._is_flat = flat and group is None
            if in_place or self._is_flat:
                self.buckets = Buckets(parameters, _not_summed, in_place)
            return
        group.run("forming the group", _nothing)
        found = self.world.all_gather_object([self.world.facts.node_rank, flat])
        self._nodes, self._is_flat = [node for node, _ in found], all(flat for _, flat in found)
        kind: str = self.config.communication
        if kind == "auto":
            may_drop = self.config.precision != "fp16"
            self._automatic = Automatic(self.world, self._nodes, self.config.topk_fraction, may_drop)
            kind = self._automatic.present
        self._hook = make_comm_hook(kind, self._nodes, self.config.topk_fraction)
        self.buckets, self._is_overlapped = Buckets(parameters, self._sum_bucket, in_place), True

    def unwrap(self) -> None:
        if self.buckets is not None:
            self.buckets.detach()

    def clear(self, parameters: list[nn.Parameter]) -> None:
        """Before the first backward pass of a step: no gradients."""
        if self.buckets is not None:
            self.buckets.clear()
            return
        for parameter in parameters:
            parameter.grad = None

    def require_sync(self, is_last: bool) -> None:
        """Before each backward pass: accumulate without communicating, in all but a step's last one."""
        if self.buckets is not None:
            self.buckets.begin(is_last)

    def finish(self, wrapped: nn.Module) -> None:
        """After the last backward pass: wait for the sums; in parameter-server mode, the gradients' way to rank 0 and
        back."""
        group = self.world.group
        if self.buckets is not None:
            self.buckets.finish()
            if self._is_overlapped:
                self.timer.mark("exposed")
                return
            self.buckets.drop_unused(self.buckets.missing_flags(), 1)
        self.timer.mark("backward")
        if group is None:
            return
        self.faults.reach("all_reduce", self.step)
        parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int64)
        group.run("which gradients there are", partial(_sum, used), used.nbytes)
        known = [parameter for parameter, count in zip(parameters, used.tolist(), strict=True) if count]
        for bucket, part in enumerate(divide(known)):
            grads = [torch.zeros_like(item) if item.grad is None else item.grad for item in part]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            group.run(_bucket_name(bucket, flat.nbytes), partial(_sum, flat), flat.nbytes)
            at = 0
            for item, grad in zip(part, grads, strict=True):
                item.grad = grad.copy_(flat[at : at + grad.numel()].view_as(grad))
                at += grad.numel()
        self.timer.mark("exposed")

    def flat_gradients(self) -> list[Tensor] | None:
        """After `finish`: flat tensors in which all gradients are, which are fewer to compute with, if there are."""
        if self.buckets is None or not (self._is_overlapped or self.world.group is None):
            return None
        return [bucket.buffer() for bucket in self.buckets.buckets]

    def single_flat_gradient(self) -> Tensor | None:
        """After `settle`: the one such tensor, if there is no more than one, no parameter that has no gradient, and no
        rank that cannot use it, for what it comes to differs in the last bits."""
        if not self._is_flat or self.buckets is None or len(self.buckets.buckets) > 1 or not self.buckets.is_complete:
            return None
        return self.buckets.buckets[0].buffer()

    def missing_flags(self) -> list[int]:
        """What ranks must sum after `finish`, for `settle`: 1 for each parameter that this one has no gradient for."""
        return self.buckets.missing_flags() if self.buckets is not None and self._is_overlapped else []

    def drop_unused(self, ranks_without: list[int]) -> None:
        """What no rank has a gradient for is left alone."""
        if self.buckets is not None and self._is_overlapped:
            self.buckets.drop_unused(ranks_without, self.world.world_size)

    def sum_each_pass(self, model: nn.Module, module: nn.Module) -> None:
        """For a loop that calls none of these methods, but ``model``, which is called instead of the wrapped module:
        each backward pass through its outputs adds the sum over ranks to gradients that are equal on all of them."""
        if self.world.group is None:
            return

        def mind(_: nn.Module, __: Any, outputs: Any) -> None:
            for output in tree_leaves(outputs):
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(begin)

        def begin(_: Tensor) -> None:
            # Before any parameter's gradient, and in the outermost pass, which is the one to be waited for.
            number = torch._C._current_graph_task_id()
            if number != self._pass:
                self._pass = number
                self._begin_pass(module)
                torch.autograd.Variable._execution_engine.queue_callback(end)

        def end() -> None:
            self.finish(module)
            if without := self.missing_flags():
                self.drop_unused(self.world.all_reduce(torch.tensor(without)).tolist())

        model.register_forward_hook(mind)

    def _begin_pass(self, module: nn.Module) -> None:
        if self.buckets is not None:
            self.buckets.begin()
            self.buckets.take_as_they_are()
        for parameter in module.parameters():
            if self.world.rank > 0 and parameter.requires_grad and parameter.grad is not None:
                parameter.grad.zero_()  # what was summed before counts once

    def review(self, window: TimingWindow) -> dict[str, Any] | None:
        """After a window of `trainer.observability.comm_profiler`, between steps: is what ``auto`` does still the best?
        What a ``communication`` event says, if there is something to say. All ranks must call it."""
        if self._automatic is None or self.buckets is None:
            return None
        before = self._automatic.present
        found = self._automatic.review(window, [bucket.buffer() for bucket in self.buckets.buckets])
        if self._automatic.present != before:
            self._hook = make_comm_hook(self._automatic.present, self._nodes, self.config.topk_fraction)
        return found

    def _sum_bucket(self, bucket: Bucket) -> CollectiveResult:
        """On the thread of autograd, once per bucket, in the same order on all ranks."""
        if bucket.index() == 0:
            self.faults.reach("all_reduce", self.step)
        if bucket.is_last():
            self.timer.mark("backward")  # what is left of it is the others' and the network's
        group, hook, gradients = self.world.group, self._hook, bucket.buffer()
        assert group is not None
        what = _bucket_name(bucket.index(), gradients.nbytes)
        if isinstance(hook, NoCompression) and bucket.index() == 0 and bucket.is_last():
            outcome = group.all_reduce(what, gradients)
        else:
            work = partial(_sum_by, hook, gradients, bucket.index(), self.step, group.computing)
            outcome = group.submit(what, work, hook.bytes_of(gradients))
        if bucket.is_last() and self.on_last_bucket is not None:
            self.on_last_bucket()
        return outcome


def _sum(tensor: Tensor, transport: Transport) -> None:
    transport.all_reduce(tensor)


def _sum_by(
    hook: CommHook, buffer: Tensor, bucket: int, step: int, computing: Computing, transport: Any
) -> None:  # fmt: skip
    hook.all_reduce(buffer, bucket, step, transport, computing)


def _nothing(_: Transport) -> None: ...


def _not_summed(_: Bucket) -> CollectiveResult:
    return CompletedCollective()


@lru_cache(maxsize=1024)
def _bucket_name(index: int, bytes_: int) -> str:
    return f"all-reduce of gradient bucket {index} ({bytes_:,} bytes)"
