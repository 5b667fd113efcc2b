"""`ZeroStep`: an optimizer step whose gradients and optimizer are DeepSpeed's, by its engine on a model, whose whole
state can be taken out of it and put into it (`ZeroEngine`).

With ZeRO each rank holds its part of the moments (stage 1), of the gradients too (2), and of the weights too (3). With
stage 3, which takes the weights out of what it is given, the engine works on a copy of the model that shares its
buffers. The module of the training is a whole on every rank where it is read: for evaluations, checkpoints and the end;
the weights of a copy are copied into it then. So a checkpoint is that of any other strategy.

DeepSpeed wants torch's default process group, which is made beside that of the world, once in a process.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.comm.group import is_communication_error, shorten_error
from trainer.comm.own_address import interface_of, own_address
from trainer.comm.rendezvous_store import AuthenticatedStore
from trainer.comm.static_rendezvous import open_listener
from trainer.comm.torch_transport import prove_connections
from trainer.comm.world import World
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.data.batches import Batch
from trainer.engine.out_of_memory import MicroBatchLimit
from trainer.engine.step import TrainingStep
from trainer.engine.steps import StepFlags, StepResult, explain_non_finite
from trainer.model.blocks import checkpoint_activations
from trainer.model.optimizers import USUAL, OptimizerRecipe, split_by_decay
from trainer.model.task import Task
from trainer.parallel.replicas import count_passes
from trainer.parallel.synchronizer import GradientSync
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter, as torch calls it."""
MOST_IN_BUCKET = 50_000_000
"""The most gradients that DeepSpeed sums at once."""


class ZeroStep(TrainingStep):
    """An optimizer step by DeepSpeed. It stays in the world that `adopt` gives it first."""

    is_divided, can_regroup = True, False

    def __init__(
        self,
        module: nn.Module,
        task: Task,
        config: DistributedTrainingConfig,
        device: torch.device,
        faults: Faults,
        recipe: OptimizerRecipe = USUAL,
        total_steps: int = 0,
    ) -> None:
        if config.clip_value is not None:
            raise ConfigError(
                "training.clip_value: DeepSpeed clips by the norm only: use clip_norm, or another strategy"
            )
        self._engine: ZeroEngine | None = None
        self._norm = math.nan
        super().__init__(module, task, config, device, faults, recipe, total_steps)
        if scalars := [name for name, item in module.named_parameters() if not item.dim()]:
            raise ConfigError(
                f"training.strategy = 'deepspeed' cannot divide {', '.join(scalars)}, which has no dimension: make it "
                "a tensor of one element, or set training.strategy = 'ddp'"
            )

    def adopt(self, world: World) -> None:
        """Give the model and the state of the optimizer to DeepSpeed, with the ranks of this world."""
        if self._engine is not None:
            raise RuntimeError("DeepSpeed's ranks cannot change within a process")
        self.world = world
        with self._communicating():
            form_default_group(world, self.config.collective_timeout_seconds)
            self._engine = ZeroEngine(self.module, self.config, world.rank, world.world_size, self.device)
        self._engine.set_moments(self.scheduled.tensors())
        self.optimizer.state.clear()
        self.loss = self._make_loss(self._engine.model)
        self.sync = ZeroSynchronizer(world, self._engine, self.faults, self.timer)

    def __call__(self, batch: Batch, step: int, learning_rate: float, flags: StepFlags) -> StepResult:
        """Train on one global batch, as `TrainingStep` does. Where a gradient is not finite, DeepSpeed has left the
        weights as they were."""
        engine = self._require_engine()
        engine.set_learning_rate(learning_rate)
        engine.model.train()
        result = super().__call__(batch, step, learning_rate, flags)
        if not math.isfinite(self._norm):
            raise explain_non_finite(step, learning_rate, self._norm)
        return replace(result, grad_norm=self._norm)

    def update(self) -> None:
        """Clip the gradient and update the weights of a step that is committed. A collective."""
        with self._communicating():
            self._norm = self._require_engine().update()

    def take_whole(self) -> None:
        """Copy the present weights into the module, on every rank. A collective."""
        if self._engine is not None:
            with self._communicating():
                self._engine.take_weights(self.module)

    def apply_limit(self, fit: MicroBatchLimit) -> None:
        """Limit the samples that go through the model at once."""
        was_checkpointed = self._is_checkpointed
        super().apply_limit(fit)
        is_copy = self._engine is not None and self._engine.module is not self.module
        if is_copy and self._is_checkpointed and not was_checkpointed:
            checkpoint_activations(self._require_engine().module)

    def release(self) -> None:
        """Leave the model as any other."""
        super().release()
        if self._engine is not None:
            self._engine.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, as `TrainingStep` has it. A collective."""
        state = super().state_dict()
        if self._engine is not None:
            with self._communicating():
                state["optimizer"]["state"] = self._engine.moments()
        return state

    def _backward(self, loss: Tensor, share: Tensor) -> None:
        self._require_engine().backward(loss * share)

    def _measure_norm(self) -> Tensor:
        """Return 0: the norm is known after the update, which clips."""
        return torch.zeros((), device=self.device)

    def _require_engine(self) -> ZeroEngine:
        if self._engine is None:
            raise RuntimeError("no world was entered yet")
        return self._engine

    @contextmanager
    def _communicating(self) -> Iterator[None]:
        """Let failures of DeepSpeed's communication fail the group of the world."""
        try:
            yield
        except Exception as error:
            peers = self.world.group
            if peers is None or not is_communication_error(error):
                raise
            peers.fail(shorten_error(error))
            assert peers.error is not None
            raise peers.error from error


def zero_config(config: DistributedTrainingConfig, ranks: int, trained: int) -> dict[str, Any]:
    """Return DeepSpeed's own configuration for these settings. ``trained``: the number of weights that are trained.
    Pure."""
    # DeepSpeed makes a buffer for a whole bucket of gradients, which by default is 2 GB for the smallest model.
    zero: dict[str, Any] = {"stage": config.zero_stage, "reduce_bucket_size": min(MOST_IN_BUCKET, max(1, trained))}
    if config.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if config.zero_stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    return {
        # Its passes are counted by `set_gradient_accumulation_boundary`, and samples by our sampler.
        "train_micro_batch_size_per_gpu": config.batch_size_per_gpu,
        "gradient_accumulation_steps": 1,
        "train_batch_size": config.batch_size_per_gpu * ranks,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW updates on the host as well, and needs no compiler
        "gradient_clipping": config.clip_norm or 0.0,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


class ZeroEngine:
    """DeepSpeed's engine on a module, or with stage 3 on a copy of it, with torch's AdamW."""

    def __init__(
        self, module: nn.Module, config: DistributedTrainingConfig, rank: int, ranks: int, device: torch.device
    ) -> None:
        """Begin with the module's weights, which must be equal on all ranks. Torch's default process group has these
        ranks already. A collective."""
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # Sums through shared memory, which each CPU rank would compile at its first use, waiting for a lock that stays
        # where a compilation was killed.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.module = _copied(module) if config.zero_stage == 3 else module
        self.config, self.rank, self.ranks, self.device = config, rank, ranks, device
        self._own = {name for parameter in module.parameters() for name in vars(parameter)}
        """The attributes of parameters that are not DeepSpeed's."""
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        count = sum(parameter.numel() for parameter in trained)
        groups = split_by_decay(trained, config)
        optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)
        self._engine, self._zero, *_ = deepspeed.initialize(
            model=self.module, optimizer=optimizer, config=zero_config(config, ranks, count), dist_init_required=False
        )
        self._adamw = optimizer

    @property
    def model(self) -> nn.Module:
        """The callable model."""
        return self._engine

    @property
    def updates(self) -> int:
        """The updates so far."""
        return max((round(float(item["step"])) for item in self._zero.optimizer.state.values()), default=0)

    def set_learning_rate(self, rate: float) -> None:
        """Use this learning rate in the next update."""
        for group in self._zero.param_groups:
            group["lr"] = rate

    def begin_pass(self, is_last: bool) -> None:
        """Prepare a forward and a backward pass. ``is_last``: of the step."""
        self._engine.set_gradient_accumulation_boundary(is_last)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's loss; DeepSpeed sums them over ranks. A collective where a rank holds a part
        of the gradients only."""
        self._engine.backward(loss * self.ranks)  # which it averages over ranks

    def update(self) -> float:
        """Clip the gradients and update the weights. Return the norm before clipping, of all gradients; where it is not
        finite, nothing was updated. A collective."""
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return math.inf if norm is None else float(norm)

    def discard(self) -> None:
        """Discard the gradients."""
        self._zero.zero_grad()

    def take_weights(self, module: nn.Module) -> None:
        """Copy the whole weights into the module that this was made with, where it is not trained itself. A
        collective."""
        import deepspeed

        if self.module is module:
            return
        with torch.no_grad():
            for mine, theirs in zip(self.module.parameters(), module.parameters(), strict=True):
                with deepspeed.zero.GatheredParameters([mine]):
                    theirs.copy_(mine)

    def moments(self) -> dict[int, dict[str, Tensor]]:
        """Return the state of AdamW as torch's own has it, by the number of the parameter. A collective."""
        from deepspeed.utils import safe_get_full_optimizer_state

        updates = self.updates
        if updates == 0:
            return {}
        return {
            number: {
                "step": torch.tensor(float(updates)),
                **{kind: safe_get_full_optimizer_state(parameter, kind).clone() for kind in MOMENTS},
            }
            for number, parameter in enumerate(self.module.parameters())
            if parameter.requires_grad
        }

    def set_moments(self, state: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Take over the state of torch's AdamW; parameters that it lacks begin with zeros. Called before the first step
        in any case: DeepSpeed looks for the moments once, after the step of the first group, when the others have
        none yet."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        updates = max((float(of_one["step"]) for of_one in state.values()), default=0.0)
        inner, stage = self._zero.optimizer, self.config.zero_stage
        groups = inner.param_groups
        parts = self._zero.fp32_partitioned_groups_flat if stage == 3 else [p for it in groups for p in it["params"]]
        for part in parts:
            zeros = {kind: torch.zeros_like(part) for kind in MOMENTS}
            inner.state[part] = {"step": torch.tensor(updates, device=part.device), **zeros}
        if stage < 3:
            self._zero._lazy_init_hp_params_optimizer_state()
        for number, parameter in enumerate(self.module.parameters()):
            for kind in MOMENTS:
                if number not in state or not parameter.requires_grad:
                    continue
                whole = state[number][kind].to(self.device)
                if stage < 3:
                    safe_set_full_optimizer_state(parameter, whole, kind)
                else:  # where parts do not divide a parameter evenly, DeepSpeed cannot cut them itself
                    safe_set_local_optimizer_state(parameter, self._part_of(whole, parameter), kind)

    def _part_of(self, whole: Tensor, parameter: Any) -> Tensor:
        """Return the part that this rank holds of a tensor like a parameter, with zeros behind the end."""
        length = parameter.ds_tensor.numel()
        padded = whole.new_zeros(length * self.ranks)
        padded[: whole.numel()] = whole.flatten()
        return padded[length * self.rank :][:length]

    def close(self) -> None:
        """Let go of the model: as any other, with each parameter in memory of its own."""
        self._engine.destroy()
        for name in ("module_forward_pre_hook", "module_forward_post_hook"):
            if (hook := getattr(self._engine, name, None)) is not None:
                hook.remove()
        for parameter in self.module.parameters():
            parameter.data = parameter.data.clone()
            for name in [name for name in vars(parameter) if name not in self._own]:
                delattr(parameter, name)


class ZeroSynchronizer(GradientSync):
    """The passes of a step through DeepSpeed's engine, which sums gradients by itself and keeps them."""

    def __init__(self, world: World, engine: ZeroEngine, faults: Faults, timer: StepTimer) -> None:
        super().__init__(world, faults, timer)
        self.engine = engine

    def clear(self, parameters: list[nn.Parameter]) -> None:
        """Clear what a step that failed has left."""
        self.engine.discard()

    def passes(self, samples: int, micro_batches: int, at_once: int) -> int:
        """Return the passes of every rank where each is a collective: with all stages but the first."""
        if self.engine.config.zero_stage == 1:
            return 0
        return count_passes(samples, micro_batches, self.world.world_size, at_once)

    def require_sync(self, is_last: bool) -> None:
        """Prepare a backward pass."""
        if is_last:
            self.faults.reach("all_reduce", self.step)
        self.engine.begin_pass(is_last)

    def finish(self, wrapped: nn.Module) -> None:
        """The last backward pass has summed what was left."""
        self.timer.mark("backward")


def form_default_group(world: World, timeout: float) -> None:
    """Make torch's default process group of the ranks of this world, unless there is one of the same ranks already. A
    collective. ``timeout``: the seconds that a collective may wait for a peer.

    Raise `trainer.comm.group.GroupError` or RuntimeError where that fails."""
    os.environ.setdefault("LOCAL_RANK", str(world.facts.local_rank))  # which DeepSpeed reads, whatever the launcher
    rank, size = world.rank, world.world_size
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, size):
            raise RuntimeError(
                f"torch's default process group has rank {dist.get_rank()} of {dist.get_world_size()}, and this "
                f"training is rank {rank} of {size}: call torch.distributed.destroy_process_group() first"
            )
        return
    limit = timedelta(seconds=timeout)
    if size == 1:
        dist.init_process_group(_backend(world), store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
        return
    host = own_address(os.environ)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(host))
    listener = open_listener(host) if rank == 0 else None
    mine: list[Any] = [host, listener.getsockname()[1] if listener else 0, secrets.token_hex(32)]
    host, port, key = world.all_gather_object(mine)[0]
    store = AuthenticatedStore((host, port), rank, size, bytes.fromhex(key), timeout, listener)
    dist.init_process_group(_backend(world), store=store, rank=rank, world_size=size, timeout=limit)
    prove_connections(dist.group.WORLD, rank, size, bytes.fromhex(key), timeout)


def _backend(world: World) -> str:
    return "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares its buffers. Raise `ConfigError` where that is impossible."""
    shared = {id(buffer): buffer for buffer in module.buffers()}
    try:
        return copy.deepcopy(module, dict(shared))
    except Exception as error:
        raise ConfigError(
            f"training.zero_stage = 3 trains a copy of the model, which cannot be copied ({error}): make "
            "copy.deepcopy(model) work, set training.zero_stage to 1 or 2, or training.strategy to fsdp"
        ) from error
