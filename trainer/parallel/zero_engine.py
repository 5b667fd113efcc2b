"""`ZeroEngine`: a model that DeepSpeed trains, and whose whole state can be taken out of it and put into it.

With ZeRO each rank holds its part of the moments (stage 1), of the gradients too (2), and of the weights too (3). With
stage 3, which takes the weights out of what it is given, the engine works on a copy of the model that shares its
buffers. How ranks of a `trainer.comm.world.World` become the process group that DeepSpeed wants is
`trainer.parallel.zero_group`.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import ConfigError, DistributedTrainingConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The names of the moments, as torch calls them."""
MOST_IN_BUCKET = 50_000_000
"""The most gradients that DeepSpeed sums at once."""


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
    ) -> None:  # fmt: skip
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
        optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)
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
        """Take over the state of torch's AdamW; parameters that it lacks begin with zeros."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        updates = max((float(of_one["step"]) for of_one in state.values()), default=0.0)
        if not updates:
            return
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
