"""`ShardSynchronizer`: a step's gradients of a sharded model, in place of `trainer.parallel.synchronizer`.

Each pass ends with this rank's rows of the sum over ranks, so that no rank ever holds all gradients; those of several
passes are added up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainer.comm.world import World
from trainer.parallel.replicas import ReplicaPlan, count_passes
from trainer.parallel.shard_collectives import ShardCollectives
from trainer.parallel.sharding import ShardedModel
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer


class ShardSynchronizer:
    """The sums of a sharded model's gradients over the ranks of one world."""

    def __init__(self, world: World, plan: ReplicaPlan, model: ShardedModel, faults: Faults, timer: StepTimer) -> None:
        """``model`` holds its rows by this plan already."""
        self.world, self.plan, self.model, self.faults, self.timer = world, plan, model, faults, timer
        self.step = 0
        self.on_last_bucket: Callable[[], object] | None = None
        """Not called: the norm of the gradient has to be summed before the step is committed."""
        self.gradients: dict[str, Tensor] = {}
        """This rank's rows of the step's gradients, by name of the parameter."""
        self._collectives = ShardCollectives(world, plan, timer)
        model.connect(self._collectives)

    def unwrap(self) -> None:
        """Make the model ready for another synchronizer, also where a pass has failed."""
        self._collectives.discard()
        self.model.reset()
        self.gradients = {}

    def clear(self, parameters: list[nn.Parameter]) -> None:
        """Clear the gradients before the first pass of a step."""
        self.gradients = {}
        self.model.take_gradients()

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
        return [gradient for gradient in self.gradients.values() if gradient.numel()]

    def whole_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of whole gradients, from that of this rank's rows. A collective."""
        square = norm.detach().double().cpu().square().reshape(1)
        return (self.world.all_reduce(square, "norm of the gradient") / len(self.plan.replicas)).sqrt()[0]

    def missing_flags(self) -> list[int]:
        """No parameter is left out: those without a gradient count as having one of zeros."""
        return []

    def drop_unused(self, ranks_without: list[int]) -> None:
        """There is nothing to drop."""

    def _collect(self) -> None:
        self._collectives.finish()
        found = self.model.take_gradients()
        for name, gradient in found.items():
            if name in self.gradients:
                self.gradients[name].add_(gradient)
            else:
                self.gradients[name] = gradient
        if self.device_is_gpu:
            torch.cuda.current_stream(self.model.device).synchronize()

    @property
    def device_is_gpu(self) -> bool:
        """Whether the model computes on a GPU."""
        return self.model.device.type == "cuda"
