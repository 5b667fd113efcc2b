"""What a training of a Keras model minimises and reports, in Keras' own terms."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from trainer.config import ConfigError
from trainer.tensorflow.replica import Figure

RESERVED = ("loss", "samples")
_CLASSES = ("sparse_categorical_crossentropy", "SparseCategoricalCrossentropy")


def choose_loss(given: Any, model: Any) -> tuple[Figure, str]:
    """Return the loss with one figure per sample, and its name. Raise `ConfigError` where there is none."""
    chosen = given if given is not None else getattr(model, "loss", None)
    if isinstance(chosen, str):
        chosen = keras.losses.get(chosen)
    if isinstance(chosen, keras.losses.Loss):
        unreduced = copy.copy(chosen)
        unreduced.reduction = "none"
        return unreduced, getattr(getattr(chosen, "fn", None), "__name__", type(chosen).__name__)
    if not callable(chosen):
        raise ConfigError(
            "no loss was given: TensorFlowDistributedTrainer(…, loss=…), such as "
            "keras.losses.SparseCategoricalCrossentropy(from_logits=True)"
        )
    return chosen, getattr(chosen, "__name__", type(chosen).__name__)


def choose_metrics(given: Mapping[str, Figure] | None, loss: str) -> Mapping[str, Figure]:
    """Return the metrics; of classes without any, the accuracy. Raise `ConfigError` for a name that is taken."""
    if given is None:
        return {"accuracy": is_right} if loss in _CLASSES else {}
    for name in given:
        if name in RESERVED:
            raise ConfigError(f"a metric is named {name!r}, as a figure of every report is: give it another name")
    return given


def is_right(target: Any, outputs: Any) -> Any:
    """Return 1 where the most probable class is the target, (B, …)."""
    return tf.cast(tf.equal(tf.cast(tf.argmax(outputs, -1), target.dtype), target), tf.float32)
