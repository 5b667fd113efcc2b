"""`GradientSynchronizer`: gradients are summed over ranks while the backward pass still computes (R2.3).

DDP fills buckets and hands each over as soon as it is full; the communication thread sums them over ranks, in order,
as ``training.communication`` says (`trainer.compression`).
In parameter-server mode (D3) there is no DDP: when the backward pass is done, all gradients go to rank 0 and back, as
they are, for that mode is there when nothing else works.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.choice import Automatic
from trainer.compression import Computing, Scheme, check, make_scheme
from trainer.config import DistributedTrainingConfig
from trainer.faults import Faults
from trainer.group import GroupError, TorchTransport, Transport
from trainer.timing import Segment, StepTimer
from trainer.world import World

if TYPE_CHECKING:
    from trainer.communication import Window


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
        self._scheme: Scheme
        self._automatic: Automatic | None = None
        self._buckets: dict[int, Tensor] = {}
        """The latest of each, by number."""
        check(self.config)

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module to call in a step; the module itself where DDP has no part in it. Its parameters must be equal on
        all ranks already. Waits for the group; raises `GroupError`."""
        group = self.world.group
        if group is None or self.world.topology == "star":
            return module
        process_group = group.run("forming the group", _ddp_group)
        self._nodes = self.world.gather(self.world.facts.node_rank)
        kind: str = self.config.communication
        if kind == "auto":
            may_drop = self.config.precision != "fp16"
            self._automatic = Automatic(self.world, self._nodes, self.config.topk_fraction, may_drop)
            kind = self._automatic.present
        self._scheme = make_scheme(kind, self._nodes, self.config.topk_fraction)
        ids = [self.world.device.index] if self.world.device.type == "cuda" else None
        # Looking for unused parameters lets a user's model have some, and keeps the first buckets. Rebuilt ones sum in
        # another order, and then the steps after a resume are not those of a run without one, bit for bit.
        wrapped = DistributedDataParallel(
            module, device_ids=ids, process_group=process_group, gradient_as_bucket_view=True,
            find_unused_parameters=True, forward_sync_buffers=False, init_sync=False,
        )  # fmt: skip
        wrapped.register_comm_hook(None, self._hook)
        return wrapped

    def only_the_last(self, wrapped: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """Accumulate without communicating, in all but a step's last backward pass."""
        if is_last or not isinstance(wrapped, DistributedDataParallel):
            return contextlib.nullcontext()
        return wrapped.no_sync()

    def after_backward(self, wrapped: nn.Module, is_last: bool) -> Segment:
        """What a backward pass was doing when it returned: DDP's last one waits for the sums."""
        return "exposed" if is_last and isinstance(wrapped, DistributedDataParallel) else "backward"

    def finish(self, wrapped: nn.Module) -> None:
        """After the last backward pass: in parameter-server mode, the gradients' way to rank 0 and back."""
        group = self.world.group
        if group is None or isinstance(wrapped, DistributedDataParallel):
            return
        self.faults.reach("all_reduce", self.step)
        parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int64)
        group.run("which gradients there are", partial(_sum, used), used.nbytes)
        known = [parameter for parameter, count in zip(parameters, used.tolist(), strict=True) if count]
        for bucket, part in enumerate(_parts(known)):
            grads = [torch.zeros_like(item) if item.grad is None else item.grad for item in part]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            group.run(_bucket_name(bucket, flat), partial(_sum, flat), flat.nbytes)
            at = 0
            for item, grad in zip(part, grads, strict=True):
                item.grad = grad.copy_(flat[at : at + grad.numel()].view_as(grad))
                at += grad.numel()
        self.timer.mark("exposed")

    def review(self, window: Window) -> dict[str, Any] | None:
        """After a window of `trainer.communication`, between steps: is what ``auto`` does still the best? What a
        ``communication`` event says, if there is something to say. All ranks must call it."""
        if self._automatic is None:
            return None
        before = self._automatic.present
        found = self._automatic.review(window, [self._buckets[index] for index in sorted(self._buckets)])
        if self._automatic.present != before:
            self._scheme = make_scheme(self._automatic.present, self._nodes, self.config.topk_fraction)
        return found

    def _hook(self, _, bucket):  # no annotations: DDP wants real classes there, or nothing
        """Called by DDP on the thread of autograd, once per bucket, in the same order on all ranks."""
        if bucket.index() == 0:
            self.faults.reach("all_reduce", self.step)
        buffer = bucket.buffer()
        devices = [buffer.device] if buffer.device.type == "cuda" else None
        result: Any = torch.futures.Future(devices=devices)

        def done(future: Future[None]) -> None:
            error = future.exception()
            # DDP reports the exception as something that is no tensor; the step asks the group for the real one.
            result.set_result(buffer) if error is None else result.set_exception(error)

        group, scheme = self.world.group, self._scheme
        assert group is not None
        self._buckets[bucket.index()] = buffer
        what = _bucket_name(bucket.index(), buffer)
        if bucket.is_last():
            self.timer.mark("backward")  # what is left of it is the others' and the network's
        work = partial(_sum_by, scheme, buffer, bucket.index(), self.step, group.computing)
        group.submit(what, work, scheme.bytes_of(buffer)).add_done_callback(done)
        return result


def _sum(tensor: Tensor, transport: Transport) -> None:
    transport.sum(tensor)


def _sum_by(
    scheme: Scheme, buffer: Tensor, bucket: int, step: int, computing: Computing, transport: Any
) -> None:  # fmt: skip
    scheme.sum(buffer, bucket, step, transport, computing)


def _ddp_group(transport: Any) -> Any:
    if not isinstance(transport, TorchTransport):
        raise GroupError("DDP needs a group of torch's")
    return transport.ddp


def _bucket_name(index: int, buffer: Tensor) -> str:
    return f"all-reduce of gradient bucket {index} ({buffer.numel() * buffer.element_size():,} bytes)"


def _parts(parameters: list[nn.Parameter], limit: int = 25 << 20) -> list[list[nn.Parameter]]:
    """Consecutive parameters of one type, up to about ``limit`` bytes together."""
    parts: list[list[nn.Parameter]] = []
    size, kind = 0, None
    for parameter in parameters:
        bytes_ = parameter.numel() * parameter.element_size()
        if not parts or size + bytes_ > limit or parameter.dtype != kind:
            parts.append([])
            size, kind = 0, parameter.dtype
        parts[-1].append(parameter)
        size += bytes_
    return parts
