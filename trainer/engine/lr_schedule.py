"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from trainer.config import DistributedTrainingConfig


def peak_learning_rate(config: DistributedTrainingConfig) -> float:
    """Return the configured rate, scaled to the global batch: linearly (Goyal et al. 2017), by its square root
    (Krizhevsky 2014), or not at all."""
    if config.lr_scaling == "none":
        return config.learning_rate
    ratio = config.global_batch_size / config.lr_base_batch_size
    return config.learning_rate * {"linear": ratio, "sqrt": math.sqrt(ratio)}[config.lr_scaling]


def learning_rate(config: DistributedTrainingConfig, step: int, total_steps: int) -> float:
    """Return the rate of optimizer step ``step`` (from 0): linear warm-up, then half a cosine to ``min_lr_fraction``,
    or constant."""
    peak = peak_learning_rate(config)
    warmup = min(config.warmup_steps, total_steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.schedule == "constant":
        return peak
    progress = (step - warmup) / max(1, total_steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * (config.min_lr_fraction + (1 - config.min_lr_fraction) * cosine)
