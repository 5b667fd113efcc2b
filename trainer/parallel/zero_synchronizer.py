"""`ZeroSynchronizer`: a step's gradients where DeepSpeed sums them, in place of `trainer.parallel.synchronizer`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from trainer.comm.world import World
from trainer.parallel.replicas import count_passes
from trainer.parallel.zero_engine import ZeroEngine
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer


class ZeroSynchronizer:
    """The passes of a step through DeepSpeed's engine, which sums gradients by itself and keeps them."""

    def __init__(self, world: World, engine: ZeroEngine, faults: Faults, timer: StepTimer) -> None:
        self.world, self.engine, self.faults, self.timer = world, engine, faults, timer
        self.step = 0
        self.on_last_bucket: Callable[[], object] | None = None
        """Not called: a step is committed after its last pass."""

    def unwrap(self) -> None:
        """What DeepSpeed has put into the model stays until the engine is closed."""

    def clear(self, parameters: list[nn.Parameter]) -> None:
        """Clear what a step that failed has left."""
        self.engine.discard()

    def passes(self, samples: int, micro_batches: int, at_once: int) -> int:
        """Return how many passes every rank makes for a global batch of this many samples, where each is a collective;
        0 where ranks may make as many as they have work for."""
        if self.engine.config.zero_stage == 1:
            return 0
        return count_passes(samples, micro_batches, self.world.world_size, at_once)

    def begin_forward(self) -> None:
        """Nothing is to be prepared."""

    def require_sync(self, is_last: bool) -> None:
        """Prepare a backward pass."""
        if is_last:
            self.faults.reach("all_reduce", self.step)
        self.engine.begin_pass(is_last)

    def finish(self, wrapped: nn.Module) -> None:
        """The last backward pass has summed what was left."""
        self.timer.mark("backward")

    def flat_gradients(self) -> list[Tensor]:
        """They are DeepSpeed's own."""
        return []

    def missing_flags(self) -> list[int]:
        """No parameter is left out: those without a gradient count as having one of zeros."""
        return []

    def drop_unused(self, ranks_without: list[int]) -> None:
        """There is nothing to drop."""
