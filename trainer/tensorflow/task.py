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
        _refuse_other_means(chosen)
        unreduced = copy.copy(chosen)
        unreduced.reduction = "none"
        return unreduced, getattr(getattr(chosen, "fn", None), "__name__", type(chosen).__name__)
    if not callable(chosen):
        raise ConfigError(
            "no loss was given: TensorFlowDistributedTrainer(…, loss=…), such as "
            "keras.losses.SparseCategoricalCrossentropy(from_logits=True)"
        )
    return chosen, getattr(chosen, "__name__", type(chosen).__name__)


def _refuse_other_means(loss: Any) -> None:
    """Raise `ConfigError` for a loss whose mean is none over samples."""
    if getattr(loss, "ignore_class", None) is not None:
        raise ConfigError(
            f"{type(loss).__name__} has ignore_class = {loss.ignore_class}, and the trainer takes means over all "
            "samples: leave samples of that class out of the dataset"
        )
    if loss.reduction not in ("sum_over_batch_size", "mean", "mean_with_sample_weight", "none", None):
        raise ConfigError(
            f"{type(loss).__name__} has reduction={loss.reduction!r}, and the trainer takes means over samples: leave "
            "it out, and scale the losses yourself"
        )


def describe_loss(loss: Any) -> dict[str, Any]:
    """Return the arguments of a loss of Keras; of a function none are known."""
    return dict(loss.get_config()) if isinstance(loss, keras.losses.Loss) else {}


def describe_layers(model: Any) -> dict[str, Any]:
    """Return class and arguments of each layer of a model, by its place: names count what this process has made."""
    layers = [layer for layer in model._flatten_layers(include_self=False) if not hasattr(layer, "layers")]
    return {
        f"{number:04d}": [type(layer).__name__, {name: str(each) for name, each in _arguments(layer).items()}]
        for number, layer in enumerate(layers)
    }


def _arguments(layer: Any) -> dict[str, Any]:
    try:
        found = dict(layer.get_config())
    except NotImplementedError:  # a layer of the user's own, which does not say
        return {}
    return {name: each for name, each in found.items() if name not in ("name", "seed", "build_config")}


def choose_metrics(given: Mapping[str, Figure] | None, loss: str) -> Mapping[str, Figure]:
    """Return the metrics; of classes without any, the accuracy. Raise `ConfigError` for a name that is taken."""
    if given is None:
        return {"accuracy": is_right} if loss in _CLASSES else {}
    for name in given:
        if name in RESERVED:
            raise ConfigError(f"a metric is named {name!r}, which every report already uses: give it another name")
    return given


def is_right(target: Any, outputs: Any) -> Any:
    """Return 1 where the most probable class is the target, (B, …)."""
    return tf.cast(tf.equal(tf.cast(tf.argmax(outputs, -1), target.dtype), target), tf.float32)
