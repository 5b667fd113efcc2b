"""The default stock model and its loss as Keras has them: the twins of `trainer.model.stock.tcn` and of the Student-t
loss, whose curves can be laid beside those of PyTorch from the first step on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from torch import nn

from trainer.config import ConfigError
from trainer.model import losses as torch_losses
from trainer.model.stock import DilatedTree, LinearSkip, Standardize
from trainer.spec import DataSpec


def stock_twin(spec: DataSpec, outputs: int = 3, channels: int = 32, dropout: float = 0.1) -> keras.Model:
    """Return the twin of the stock model ``tcn``: raw windows (B, W, F) to (B, outputs)."""
    width = len(spec.features)
    std = np.array(spec.feature_std, dtype=np.float32)
    windows = keras.Input((spec.window, width), name="windows")
    x = (windows - np.array(spec.feature_mean, dtype=np.float32)) / np.where(std > 0, std, np.float32(1))
    clamped = keras.ops.clip(x, -8.0, 8.0)
    depth = max(1, math.ceil(math.log2(spec.window)))
    x = keras.ops.pad(clamped, ((0, 0), (2**depth - spec.window, 0), (0, 0)))
    for index in range(depth):
        pairs = keras.ops.reshape(x, (-1, x.shape[1] // 2, 2 * x.shape[2]))
        y = keras.layers.Dense(channels, activation="relu", name=f"layer_{index}")(pairs)
        x = y + x[:, 1::2] if index else y
    body = keras.layers.Dropout(dropout, name="dropout")(x[:, 0])
    head = keras.layers.Dense(outputs, kernel_initializer="zeros", name="head")(body)
    flat = keras.layers.Flatten()(clamped)
    skip = keras.layers.Dense(outputs, use_bias=False, kernel_initializer="zeros", name="skip")(flat)
    return keras.Model(windows, head + skip * (5 / (spec.window * width)), name="tcn")


def copy_weights(module: nn.Module, twin: keras.Model) -> None:
    """Give the twin the weights of the stock model that it is of. Raise `ConfigError` for another module."""
    for name, layer in _linear_layers(module):
        weights = [layer.weight.detach().cpu().numpy().T]
        if layer.bias is not None:
            weights.append(layer.bias.detach().cpu().numpy())
        twin.get_layer(name).set_weights(weights)


def _linear_layers(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    skip = module.model if isinstance(module, Standardize) else module
    if not isinstance(skip, LinearSkip) or not isinstance(skip.body, DilatedTree):
        raise ConfigError(f"{type(skip).__name__} is not the stock model tcn, which alone has a twin in Keras")
    layers = [(f"layer_{index}", layer) for index, layer in enumerate(skip.body.layers)]
    return [*layers, ("head", skip.head), ("skip", skip.skip)]  # type: ignore[list-item]


def student_t(spec: DataSpec, **options: float) -> Callable[[Any, Any], Any]:
    """Return the twin of `trainer.model.losses.StudentTLoss` with these options: ``loss(target (B,), outputs (B, 3))``
    gives one loss per sample (B,) in nats."""
    like = torch_losses.StudentTLoss(spec, **options)
    span = like.nu_max - like.nu_min

    def student_t(target: Any, outputs: Any) -> Any:
        mean, raw_scale, shape = tf.unstack(outputs, axis=-1)
        log_sigma = tf.clip_by_value(raw_scale, -8.0, 8.0) + like.log_scale
        nu = like.nu_min + span * tf.sigmoid(shape + like.nu_bias)
        # In float64: of two large lgammas that differ by little, float32 keeps few digits.
        half = tf.cast(nu, tf.float64) / 2
        norm = tf.cast(tf.math.lgamma(half) - tf.math.lgamma(half + 0.5), tf.float32)
        z = (target - mean * like.mean_unit) * tf.exp(-log_sigma)
        tail = (nu + 1) / 2 * tf.math.log1p(z * z / nu)
        return norm + 0.5 * tf.math.log(nu * math.pi) + tail + log_sigma

    return student_t
