"""The collectives of a sharded model, over the communication thread of a world's group: parameters are gathered within
a replica, gradients are summed and divided within it (reduce-scatter), then summed between replicas (FSDP2's all-reduce
hook).

They take the places of FSDP2's own, which need torch's default group: like all our collectives, they can be interrupted
when a node is lost. Which parameters, and when, is up to `torch.distributed.fsdp`; see `trainer.parallel.sharding`.

None of them raises during a pass, because an error within FSDP2's hooks leaves its state halfway. The first failure is
kept, the pass ends with useless numbers, and `finish` raises it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.comm.group import CollectiveResult, CompletedCollective, GroupError
from trainer.comm.socket_group import MeshGroup
from trainer.comm.torch_transport import TorchTransport, Transport
from trainer.comm.world import World
from trainer.parallel.replicas import ReplicaPlan, count_passes
from trainer.parallel.sharding import ShardedModel, divided_parts
from trainer.parallel.synchronizer import GradientSync
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import Segment, StepTimer

_DIVIDABLE = (TorchTransport, MeshGroup)
"""The transports that gather and sum over a part of the ranks; with others, all ranks hold one copy of the model
(`trainer.parallel.replicas.plan_replicas`)."""


class ShardCollectives:
    """The collectives of one rank in one world."""

    def __init__(self, world: World, plan: ReplicaPlan, timer: StepTimer) -> None:
        self._group, self._timer = world.group, timer
        self.members, self.column = plan.replica_of(world.rank), plan.column_of(world.rank)
        self.place = plan.place_of(world.rank)
        self._pending: list[CollectiveResult] = []
        self._error: BaseException | None = None
        self.segment: Segment = "forward"
        """The part of the step that computes now."""

    def connect(self, module: nn.Module) -> None:
        """Be the collectives of a divided module in all passes from now on."""
        for part in divided_parts(module):
            part.set_custom_all_gather(_ParameterGather(self))  # type: ignore[arg-type]
            part.set_custom_reduce_scatter(_GradientScatter(self))  # type: ignore[arg-type]
            part.set_all_reduce_hook(self.sum_column)

    def all_gather(self, output: Tensor, mine: Tensor) -> CollectiveResult:
        """Gather the rows of all ranks of the replica into ``output``, of which ``mine`` is a part."""
        work = partial(_gather, output, mine, self.members, self.place)
        return self._submit(f"gather of parameters ({output.nbytes:,} bytes)", work, output.nbytes // 2)

    def reduce_scatter(self, output: Tensor, gradients: Tensor) -> None:
        """Sum gradients over the ranks of the replica, and put this rank's rows of the sum into ``output``: later, but
        before `finish` returns."""
        work = partial(_scatter, output, gradients, self.members, self.place)
        what = f"sum of sharded gradients ({gradients.nbytes:,} bytes)"
        self._pending.append(self._submit(what, work, gradients.nbytes // 2))

    def sum_column(self, gradients: Tensor) -> None:
        """Sum this rank's rows over replicas, in place, after `reduce_scatter` and before `finish` returns."""
        if len(self.column) > 1:
            work = partial(_sum_column, gradients, self.column)
            what = f"sum of gradients over replicas ({gradients.nbytes:,} bytes)"
            self._pending.append(self._submit(what, work, gradients.nbytes))

    def wait_for(self, outcome: CollectiveResult) -> None:
        """Wait for a collective, on a GPU too: FSDP2 uses what it has gathered in streams of its own. Keep its error.
        The time counts as exposed communication."""
        is_late = not outcome.done()
        if is_late:
            self._timer.mark(self.segment)
        error = outcome.exception()
        if error is None and self._group is not None:
            try:
                self._group.wait()
            except GroupError as failed:
                error = failed
        if error is not None and self._error is None:
            self._error = error
        if is_late:
            self._timer.mark("exposed")

    def finish(self) -> None:
        """Wait for all sums. Raise the first `trainer.comm.group.GroupError` of the collectives since the last call."""
        pending, self._pending = self._pending, []
        for future in pending:
            self.wait_for(future)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def discard(self) -> None:
        """Wait for all sums, and forget how they ended: the pass that asked for them is lost."""
        try:
            self.finish()
        except GroupError:
            return

    def _submit(self, what: str, action: Callable[[Transport], Any], bytes_: int) -> CollectiveResult:
        if self._group is None:
            return CompletedCollective()
        return self._group.submit(what, action, bytes_)


class _PendingGather(dist.Work):
    """A gather as FSDP2 waits for it."""

    def __init__(self, collectives: ShardCollectives, outcome: CollectiveResult) -> None:
        super().__init__()
        self._collectives, self._outcome = collectives, outcome

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the gather; see `ShardCollectives.wait_for`."""
        self._collectives.wait_for(self._outcome)
        return True


class _OverGroup:
    """A collective that FSDP2 is given in place of its own."""

    def __init__(self, collectives: ShardCollectives) -> None:
        self._collectives = collectives

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what comes out."""
        return torch.empty(*size, dtype=dtype, device=device)


class _ParameterGather(_OverGroup):
    """FSDP2's all-gather, as `ShardCollectives.all_gather`."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> dist.Work:
        return _PendingGather(self._collectives, self._collectives.all_gather(output_tensor, input_tensor))


class _GradientScatter(_OverGroup):
    """FSDP2's reduce-scatter, as `ShardCollectives.reduce_scatter`: the backward pass goes on meanwhile. FSDP2 takes
    views of the result and computes nothing with it, as there is no factor and no other type to turn it into."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        assert op == dist.ReduceOp.SUM
        self._collectives.reduce_scatter(output_tensor, input_tensor)
        return None


def _gather(output: Tensor, mine: Tensor, members: Sequence[int], place: int, transport: Any) -> None:
    if isinstance(transport, _DIVIDABLE):
        transport.gather_among(output, mine, members)
        return
    # A transport that only sums, over all ranks: the others' rows are zeros here.
    kept = mine.clone()
    output.zero_()
    output.view(len(members), -1)[place].copy_(kept.view(-1))
    transport.all_reduce(output)


def _scatter(output: Tensor, gradients: Tensor, members: Sequence[int], place: int, transport: Any) -> None:
    if isinstance(transport, _DIVIDABLE):
        transport.scatter_sum(output, gradients, members)
        return
    transport.all_reduce(gradients)
    output.copy_(gradients.view(len(members), -1)[place])


def _sum_column(gradients: Tensor, column: Sequence[int], transport: Any) -> None:
    transport.sum_among(gradients, column)


class ShardSynchronizer(GradientSync):
    """The sums of a sharded model's gradients over the ranks of one world, in place of
    `trainer.parallel.synchronizer.GradientSynchronizer`. Each pass ends with this rank's rows of the sum over ranks, so
    that no rank ever holds all gradients; those of several passes are added up. The norm of the gradient has to be
    summed before the step is committed, so that it is not committed with a bucket."""

    def __init__(self, world: World, plan: ReplicaPlan, model: ShardedModel, faults: Faults, timer: StepTimer) -> None:
        """``model`` holds its rows by this plan already."""
        super().__init__(world, faults, timer)
        self.plan, self.model = plan, model
        self._collectives = ShardCollectives(world, plan, timer)
        self._collectives.connect(model.module)

    def unwrap(self) -> None:
        """Make the model ready for another synchronizer, also where a pass has failed."""
        self._collectives.discard()
        self.model.reset()

    def abandon(self) -> None:
        """Make the model ready for another pass."""
        self.unwrap()

    def clear(self, parameters: list[nn.Parameter]) -> None:
        """Clear the gradients before the first pass of a step."""
        self.model.clear_gradients()

    def passes(self, samples: int, micro_batches: int, at_once: int) -> int:
        """Return how many passes every rank makes for a global batch of this many samples."""
        return count_passes(samples, micro_batches, self.world.world_size, at_once)

    def begin_forward(self) -> None:
        """Say that a forward pass begins."""
        self._collectives.segment = "forward"

    def require_sync(self, is_last: bool) -> None:
        """Prepare a backward pass, after the forward pass: add up what the passes before have left."""
        self._collect()  # here, since their sums had the forward pass's time to arrive
        self._collectives.segment = "backward"

    def finish(self, wrapped: nn.Module) -> None:
        """Wait for the sums after the last backward pass. Raise `trainer.comm.group.GroupError` if one has failed."""
        self.timer.mark("backward")
        self.faults.reach("all_reduce", self.step)
        self._collect()
        self.timer.mark("exposed")

    def flat_gradients(self) -> list[Tensor]:
        """Return this rank's rows of the gradients."""
        gradients = [held.grad for held in self.model.held.values() if held.grad is not None]
        return [gradient for gradient in gradients if gradient.numel()]

    def whole_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of whole gradients, from that of this rank's rows. A collective."""
        square = norm.detach().double().cpu().square().reshape(1)
        total = self.world.all_reduce(square, "norm of the gradient") / len(self.plan.replicas)
        return total.sqrt()[0].to(norm)

    def _collect(self) -> None:
        self._collectives.finish()
        self.model.collect_gradients()
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()
