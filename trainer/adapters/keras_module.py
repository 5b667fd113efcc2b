"""A Keras model as a module of torch, and losses of Keras as losses of torch: TensorFlow computes, torch holds the
weights.

Each pass gives the weights to TensorFlow, and what it computes has a gradient by its tape. So whatever trains a module
of torch trains this one: the loop, sums over ranks, the optimizer, checkpoints. This module alone imports TensorFlow.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch
from torch import Tensor, nn

from trainer.comm.launcher_env import RankFacts
from trainer.comm.world import choose_gpu
from trainer.config import ConfigError, DistributedTrainingConfig

if "triton" not in sys.modules:
    sys.modules["triton"] = None  # type: ignore[assignment]  # torch does without it; loaded after TensorFlow it crashes
Figure = Callable[[Any, Any], Any]
"""``figure(target, outputs)``, in Keras' order: one number per sample."""
_CLASSES = "sparse_categorical_crossentropy"
_SEED_STATE = "seed_generator_state"
_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "none", None)


def prepare_tensorflow(facts: RankFacts, config: DistributedTrainingConfig) -> None:
    """Leave this rank its own GPU and threads, unless TensorFlow has begun to compute, and seed Keras. Raise
    `ConfigError` where Keras computes by another library."""
    if keras.backend.backend() != "tensorflow":
        raise ConfigError(
            f"Keras uses {keras.backend.backend()} here: set KERAS_BACKEND=tensorflow before Keras is imported"
        )
    gpus = tf.config.list_physical_devices("GPU")
    with suppress(RuntimeError):
        if (number := choose_gpu(len(gpus), facts, "auto")) is not None:
            tf.config.set_visible_devices(gpus[number], "GPU")
            tf.config.experimental.set_memory_growth(gpus[number], True)  # torch has its part of the memory
        if config.threads_per_rank is not None:
            tf.config.threading.set_intra_op_parallelism_threads(config.threads_per_rank)
    keras.utils.set_random_seed(config.seed % 2**32)


class KerasModule(nn.Module):
    """A Keras model whose variables are parameters of torch, by their places in it. Dropout follows torch's seed."""

    def __init__(self, model: Any, call: Any = None) -> None:
        """Raise `ConfigError` for what cannot be trained. ``call``: the compiled model, where there is one already."""
        super().__init__()
        check_keras_model(model)
        self.keras_model = model
        self._call = call or tf.function(
            lambda inputs, training: model(inputs, training=training), autograph=False, reduce_retracing=True
        )
        self._variables = [variable for variable in model.variables if _SEED_STATE not in variable.path]
        self._seeds = [variable for variable in model.variables if _SEED_STATE in variable.path]
        trained = set(map(id, model.trainable_variables))
        for number, variable in enumerate(self._variables):
            # By place: Keras numbers layers without a name by how many it has made before in this process.
            parameter = nn.Parameter(_torch(variable.value), requires_grad=id(variable) in trained)
            self.register_parameter(f"{number:04d}_{variable.name}", parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasModule:
        """Return a module with weights of its own; the Keras model takes those of whichever is called."""
        copied = KerasModule(self.keras_model, self._call)
        copied.load_state_dict(self.state_dict())
        return copied.train(self.training)

    def describe_structure(self) -> list[Any]:
        """Return class and arguments of each layer, by its place: names count what this process has made."""
        layers = [each for each in self.keras_model._flatten_layers(include_self=False) if not hasattr(each, "layers")]
        return [[type(layer).__name__, _arguments(layer)] for layer in layers]

    def settle(self) -> Any:
        """Return the Keras model with the weights of this module."""
        for variable, parameter in zip(self._variables, self.parameters(), strict=True):
            variable.value.assign(_tensorflow(parameter), read_value=False)
        return self.keras_model

    def forward(self, inputs: Any) -> Any:
        """Return what the Keras model gives for these inputs, as tensors of torch in the same structure."""
        self.settle()
        if self.training:
            for variable in self._seeds:
                variable.value.assign(torch.randint(1 << 32, (2,)).numpy().astype(np.uint32), read_value=False)
        given = tf.nest.map_structure(_tensorflow, inputs)
        trained = [parameter.requires_grad for parameter in self.parameters()]
        sources = [variable.value for variable, is_trained in zip(self._variables, trained, strict=True) if is_trained]
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return _differentiable(lambda _: self._call(given, self.training), sources, parameters)


def as_criterion(figure: Figure) -> Figure:
    """Return a loss or a metric of Keras in torch's order: ``criterion(outputs, target)`` of tensors of torch."""
    criterion: Any
    if isinstance(figure, keras.losses.Loss):  # whose arguments a checkpoint's description shows
        criterion = functools.partial(_judge, figure)
    else:

        def criterion(outputs: Any, target: Any) -> Any:
            return _judge(figure, outputs, target)

    criterion.__qualname__ = _name_of(figure)
    return criterion


def choose_loss(given: Any, model: Any) -> Figure:
    """Return the loss with one figure per sample. Raise `ConfigError` where there is none, or where its mean is none
    over samples."""
    chosen = given if given is not None else getattr(model, "loss", None)
    if isinstance(chosen, str):
        chosen = keras.losses.get(chosen)
    if not callable(chosen):
        raise ConfigError(
            "no loss was given: TensorFlowDistributedTrainer(…, loss=…), such as "
            "keras.losses.SparseCategoricalCrossentropy(from_logits=True)"
        )
    if not isinstance(chosen, keras.losses.Loss):
        return chosen
    if getattr(chosen, "ignore_class", None) is not None:
        raise ConfigError(
            f"{type(chosen).__name__} has ignore_class = {chosen.ignore_class}, and the trainer takes means over all "
            "samples: leave samples of that class out of the dataset"
        )
    if chosen.reduction not in _MEANS:
        raise ConfigError(
            f"{type(chosen).__name__} has reduction={chosen.reduction!r}, and the trainer takes means over samples: "
            "leave it out, and scale the losses yourself"
        )
    unreduced = copy.copy(chosen)
    unreduced.reduction = "none"
    return unreduced


def choose_metrics(given: Mapping[str, Figure] | None, loss: Figure) -> dict[str, Figure]:
    """Return the metrics in torch's order; of classes without any, the accuracy."""
    if given is None:
        given = {"accuracy": keras.metrics.sparse_categorical_accuracy} if _name_of(loss) == _CLASSES else {}
    return {name: as_criterion(figure) for name, figure in given.items()}


def check_keras_model(model: Any) -> None:
    """Raise `ConfigError` for what ``make_model`` must not return."""
    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"make_model returned a {type(model).__module__}.{type(model).__qualname__}; it must return a keras.Model "
            "of Keras 3"
        )
    if not model.built:
        raise ConfigError("make_model returned a model without weights yet: give it a keras.Input, or call build(…)")
    if not model.trainable_variables:
        raise ConfigError(f"{model.name} has no weights to train")
    for variable in model.trainable_variables:
        if variable.dtype != "float32":
            raise ConfigError(f"{variable.path} is {variable.dtype}, and weights that are trained must be float32")
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            raise ConfigError(
                f"{layer.name} keeps statistics of the batches of one rank: use LayerNormalization or "
                "GroupNormalization, or freeze it (trainable = False)"
            )


def _name_of(figure: Figure) -> str:
    return str(getattr(getattr(figure, "fn", figure), "__name__", type(figure).__name__))


def _judge(figure: Figure, outputs: Any, target: Any) -> Any:
    wanted, flat = tf.nest.map_structure(_tensorflow, target), tf.nest.flatten(outputs)
    sources, call = [_tensorflow(each) for each in flat], _compiled(figure)
    return _differentiable(lambda given: call(wanted, tf.nest.pack_sequence_as(outputs, given)), sources, flat)


@functools.cache
def _compiled(figure: Figure) -> Any:
    return tf.function(figure, autograph=False, reduce_retracing=True)


def _differentiable(compute: Callable[[list[Any]], Any], sources: list[Any], tensors: Sequence[Tensor]) -> Any:
    """Return what TensorFlow computes from ``sources``, as tensors of torch whose gradients are those of ``tensors``,
    of which the sources are copies."""
    if not torch.is_grad_enabled():
        return tf.nest.map_structure(lambda each: _torch(each).to(tensors[0].device), compute(sources))
    structure = list[Any]()
    flat = _ByTape.apply(compute, sources, structure, *tensors)
    return tf.nest.pack_sequence_as(structure[0], flat)


class _ByTape(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Any, sources: list[Any], structure: list[Any], *tensors: Tensor) -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([source for source in sources if source.dtype.is_floating])
            found = compute(sources)
        structure.append(found)
        ctx.tape, ctx.sources, ctx.found, ctx.device = tape, sources, tf.nest.flatten(found), tensors[0].device
        return tuple(_torch(each).to(ctx.device) for each in ctx.found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        given = [_tensorflow(gradient) for gradient in gradients]
        zero = tf.UnconnectedGradients.ZERO
        found = ctx.tape.gradient(ctx.found, ctx.sources, output_gradients=given, unconnected_gradients=zero)
        return None, None, None, *(_torch(tf.convert_to_tensor(each)).to(ctx.device) for each in found)


def _torch(tensor: Any) -> Tensor:
    return torch.from_numpy(np.array(tensor.numpy()))


def _tensorflow(tensor: Tensor) -> Any:
    return tf.convert_to_tensor(tensor.detach().cpu().numpy())


def _arguments(layer: Any) -> dict[str, str]:
    try:
        found = dict(layer.get_config())
    except NotImplementedError:  # a layer of the user's own, which does not say
        return {}
    return {name: str(each) for name, each in found.items() if name not in ("name", "seed", "build_config")}
