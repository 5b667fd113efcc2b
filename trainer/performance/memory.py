"""The memory that a rank needs of its device, by strategy: what it holds, what it gathers, what a pass keeps. Pure.

    held       = (parameters + gradients + what the optimizer keeps) / ranks that share one copy
    gathered   = what is there as a whole at once, where ranks share the model: see `ModelBytes.gathered`
    activations = samples at once x bytes of a sample

What a driver, an allocator and buffers of communication take besides is not in it. Who measures a model is
`trainer.model.sizes`, who measures a pass `trainer.engine.memory_need`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 1 << 30
MOMENTS = 2.0
"""Moments of AdamW for each parameter that is trained."""
HALF = 0.5
"""Of the activations, what autocast to half precision leaves: a rough guess, since some operations stay float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBytes:
    """What is known of a model, in bytes."""

    parameters: int
    trained: int
    """Of the parameters, those with gradients and moments."""
    block: int = 0
    """The largest part whose parameters are gathered together."""
    rest: int = 0
    """The parameters outside of such parts."""
    sample: float | None = None
    """The activations that one more sample keeps, in float32; None if it is not known."""
    moments: float = MOMENTS
    """How many numbers the optimizer keeps for each that is trained."""

    def gathered(self, is_half: bool = False) -> int:
        """Return the most that a rank has of the model as a whole at once, where ranks share it: what lies outside of
        the blocks, and of two blocks (one computes, one is fetched or summed) the parameters and as much again, their
        gradients or the copy that they came in; at the end of a pass, the gradients of what lies outside, twice.
        ``is_half``: parameters are gathered as bf16."""
        share = HALF if is_half else 1.0
        blocks = 2 * (share + 1) * self.block
        return round(share * self.rest + max(blocks, (1 + share) * self.rest))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """What one rank needs, in bytes."""

    parameters: int
    gradients: int
    moments: int
    gathered: int = 0
    activations: int = 0

    @property
    def held(self) -> int:
        """Return what is there between passes, with gradients."""
        return self.parameters + self.gradients + self.moments

    @property
    def least(self) -> int:
        """Return what is needed however few samples go through the model at once."""
        return self.held + self.gathered

    @property
    def total(self) -> int:
        """Return all of it."""
        return self.least + self.activations


def count_sharing(strategy: str, ranks: int, ranks_per_node: int) -> int:
    """Return how many ranks hold one copy of the model together; 1 where each holds all of it, as with ``ddp`` and
    ``horovod``. Of ``deepspeed``, see `zero_rank_bytes`."""
    return {"fsdp": ranks, "hsdp": ranks_per_node}.get(strategy, 1)


def rank_bytes(
    model: ModelBytes, sharing: int, samples: int = 0, precision: str = "fp32", gather_precision: str = "fp32"
) -> RankBytes:
    """Return what each rank needs, if ``sharing`` ranks hold one copy together, for passes of this many samples.
    ``precision``, ``gather_precision``: as in ``training``."""
    share = HALF if precision in ("bf16", "fp16") else 1.0
    return RankBytes(
        parameters=math.ceil(model.parameters / sharing),
        gradients=math.ceil(model.trained / sharing),
        moments=math.ceil(model.moments * model.trained / sharing),
        gathered=0 if sharing == 1 else model.gathered(gather_precision != "fp32"),
        activations=round(samples * share * (model.sample or 0.0)),
    )


def zero_rank_bytes(model: ModelBytes, stage: int, ranks: int, samples: int = 0, precision: str = "fp32") -> RankBytes:
    """Return what each rank needs at least with DeepSpeed's ZeRO of this stage, as `trainer.engine.deepspeed_step`
    uses it: the model itself, and DeepSpeed's copy, which is whole up to stage 2; this rank's part of what is updated,
    of the gradients and of the moments. Its buckets, whole gradients of a pass with stage 1, and what stage 3 gathers
    at once are not counted."""
    share = HALF if precision in ("bf16", "fp16") else 1.0
    part = math.ceil(model.trained / ranks)
    return RankBytes(
        parameters=model.parameters + (model.parameters if stage < 3 else math.ceil(model.parameters / ranks)) + part,
        gradients=part,
        moments=math.ceil(MOMENTS * part),
        activations=round(samples * share * (model.sample or 0.0)),
    )


def most_samples(one: RankBytes, room: float) -> int | None:
    """Return the most samples at once that fit into ``room`` bytes of a rank, 0 if not even one does; None where what a
    sample takes is not known. ``one``: what the rank needs for passes of one sample."""
    if not one.activations:
        return None
    return max(0, math.floor((room - one.least) / one.activations))


def format_bytes(count: float) -> str:
    """Return a size in words."""
    if count >= 1000 * GIB:
        return f"{count / GIB:,.0f} GiB"
    return f"{count / GIB:.3g} GiB" if count >= GIB else f"{count / (1 << 20):.3g} MiB"
