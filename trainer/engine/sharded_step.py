"""`ShardedStep`: an optimizer step on a model whose parameters lie in rows on several ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.checkpoint.parts import MOMENTS
from trainer.comm.world import World
from trainer.config import DistributedTrainingConfig
from trainer.engine.step import TrainingStep
from trainer.model.blocks import find_blocks
from trainer.model.task import Task
from trainer.parallel.replicas import ReplicaPlan
from trainer.parallel.sharding import ShardedModel, ShardSynchronizer
from trainer.runtime.fault_injection import Faults

Rows = Mapping[str, Mapping[str, Tensor]]


class ShardedStep(TrainingStep):
    """An optimizer step on this rank's rows."""

    is_divided = divides_parameters = True

    def __init__(
        self, module: nn.Module, task: Task, config: DistributedTrainingConfig, device: torch.device, faults: Faults
    ) -> None:
        self.sharded = ShardedModel(module, find_blocks(module), config, device)
        self.plan = ReplicaPlan(((0,),))
        """How the ranks of the present world hold the model."""
        super().__init__(module, task, config, device, faults)

    def adopt(self, world: World) -> None:
        """Work in this world from now on. The model holds its rows by `plan` already."""
        self.sync.unwrap()
        self.world, self.awaits_commit = world, None
        self.sharing = self.plan.size
        self.sync = ShardSynchronizer(world, self.plan, self.sharded, self.faults, self.timer)
        self.parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def hold_rows(self, moments: Rows, updates: int) -> None:
        """Update the rows that the model holds now, with these moments (by kind and name) after so many updates."""
        self.optimizer = self._make_optimizer(list(self.sharded.held.values()))
        for name, parameter in self.sharded.held.items():
            if name in moments.get(MOMENTS[0], {}):
                count = torch.tensor(float(updates), device=parameter.device)
                self.optimizer.state[parameter] = {"step": count, **{kind: moments[kind][name] for kind in MOMENTS}}

    def moments_of_rows(self) -> tuple[dict[str, dict[str, Tensor]], int]:
        """Return the moments of this rank's rows, by kind and name, and the number of updates."""
        known, held = self.optimizer.state, self.sharded.held
        state = {name: known[parameter] for name, parameter in held.items() if parameter in known}
        updates = max((round(float(of_one["step"])) for of_one in state.values()), default=0)
        return {kind: {name: of_one[kind] for name, of_one in state.items()} for kind in MOMENTS}, updates
