"""`Replica`: a Keras model in this rank under `MultiWorkerMirroredStrategy`: gradients, sums over ranks, the update.

What TensorFlow computes, with loss and metrics in Keras' own terms, belongs here; which samples, when and at which rate
is `trainer.tensorflow.loop`. `keras.Model.fit` does not run under this strategy with several workers (Keras 3.15).
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch
from torch import Tensor

from trainer.comm.launcher_env import RankFacts
from trainer.comm.world import choose_gpu
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.tensorflow.cluster import Cluster

Figure = Callable[[Any, Any], Any]
"""``figure(target, outputs)``, in Keras' order: one number per sample."""
LOST = (
    tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError,
    tf.errors.InternalError, tf.errors.FailedPreconditionError,
)  # fmt: skip
"""What a collective raises where a peer is lost."""
BETA_1, BETA_2, EPSILON, CLIP_EPSILON = 0.9, 0.999, 1e-8, 1e-6
"""Those of torch's AdamW and `trainer.engine.step`."""
RESERVED = ("loss", "samples")
_CLASSES = ("sparse_categorical_crossentropy", "SparseCategoricalCrossentropy")
_SEED_STATE = "seed_generator_state"
_made: tuple[tuple[str, ...], Any] | None = None
"""The workers and the strategy of this process: TensorFlow starts its server once."""


def open_strategy(cluster: Cluster, config: DistributedTrainingConfig) -> Any:
    """Return the strategy of this process. A collective. Raise `ConfigError` where TensorFlow has begun without it, or
    for other workers."""
    global _made
    if _made is not None:
        if _made[0] != cluster.workers:
            raise ConfigError("TensorFlow has joined other workers in this process: start a new one for each training")
        return _made[1]
    _use_one_gpu(cluster.facts)
    kinds = tf.distribute.experimental.CommunicationImplementation
    kind = {"auto": kinds.AUTO, "gloo": kinds.RING, "nccl": kinds.NCCL}[config.backend]
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=kind, timeout_seconds=config.collective_timeout_seconds
    )
    workers = {"worker": list(cluster.workers)} if cluster.facts.world_size > 1 else {}
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(workers), task_type="worker", task_id=cluster.facts.rank, rpc_layer="grpc",
        num_accelerators={"GPU": len(tf.config.get_visible_devices("GPU"))},
    )  # fmt: skip
    try:
        if config.threads_per_rank is not None:
            tf.config.threading.set_intra_op_parallelism_threads(config.threads_per_rank)
        strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
    except RuntimeError as error:
        raise ConfigError(
            "TensorFlow has already computed in this process, and can join other workers only before that: make "
            f"tensors and models in make_model ({error})"
        ) from None
    _made = cluster.workers, strategy
    return strategy


def _use_one_gpu(facts: RankFacts) -> None:
    """Leave this rank one GPU, where it sees any: one rank is one replica. Raise `ConfigError` where the ranks of the
    host would share one."""
    gpus = tf.config.list_physical_devices("GPU")
    number = choose_gpu(len(gpus), facts, "auto")
    if number is None:
        return
    has_its_own = any(name in os.environ for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"))
    if len(gpus) < facts.local_world_size and not has_its_own:
        raise ConfigError(
            f"{facts.local_world_size} ranks of this node see {len(gpus)} GPU(s), but each needs its own: start "
            "as many ranks on a node as it has GPUs, or hide them (CUDA_VISIBLE_DEVICES=) to train on the CPUs"
        )
    tf.config.set_visible_devices(gpus[number], "GPU")


class Replica:
    """This rank's model, its moments, and its part in sums over ranks."""

    def __init__(
        self, make_model: Callable[[], Any], strategy: Any, config: DistributedTrainingConfig, loss: Any = None,
        metrics: Mapping[str, Figure] | None = None,
    ) -> None:  # fmt: skip
        """Make the model under the strategy, from the seed of the training; rank 0's weights count. ``loss`` and
        ``metrics``: see `choose_loss` and `choose_metrics`. A collective. Raise `ConfigError` for a model, a loss or
        metrics that cannot be used."""
        self.config, self.strategy = config, strategy
        if keras.backend.backend() != "tensorflow":
            raise ConfigError(
                f"Keras uses {keras.backend.backend()} here: set KERAS_BACKEND=tensorflow before Keras is imported"
            )
        with strategy.scope():
            keras.utils.set_random_seed(config.seed % 2**32)
            self.model = make_model()
            check_model(self.model)
            self.weights = [variable.value for variable in self.model.trainable_variables]
            self._moments = [
                [tf.Variable(tf.zeros(weight.shape), trainable=False) for weight in self.weights] for _ in range(2)
            ]
        self._updates = 0
        self.loss, self.loss_name = choose_loss(loss, self.model)
        self.metrics = choose_metrics(metrics, self.loss_name)
        self._seeds = [item for item in self.model.non_trainable_variables if _SEED_STATE in item.path]
        self._sizes = [int(np.prod(weight.shape)) for weight in self.weights]
        self._judge = tf.function(self._judged, autograph=False, reduce_retracing=True)
        self._differentiate = tf.function(self._differentiated, autograph=False, reduce_retracing=True)
        self._update = tf.function(self._updated, autograph=False)

    @property
    def device(self) -> str:
        """The kind of device that computes."""
        return "cuda" if tf.config.get_visible_devices("GPU") else "cpu"

    # A step

    def differentiate(self, inputs: Any, target: Any, samples: int, seed: int) -> tuple[float, Any]:
        """Return the sum of the losses of a micro-batch, and the gradient of that sum divided by ``samples``, those of
        the global batch, as one flat tensor. ``seed``: of its dropout."""
        for place, variable in enumerate(self._seeds):
            low = (seed + place * 0x9E3779B9) & 0xFFFFFFFF
            variable.assign(tf.constant([(seed >> 32) & 0xFFFFFFFF, low], tf.uint32))
        share = tf.constant(1.0 / samples, tf.float32)
        loss, gradient = self.strategy.run(self._differentiate, args=(_tensors(inputs), _tensors(target), share))
        return float(loss), gradient

    def update(self, gradient: Any, learning_rate: float) -> float:
        """Update the weights with the gradient of all ranks, clipped, and return its norm before. NaN is returned, and
        nothing is changed, where it is not finite."""
        norm = float(tf.norm(gradient))
        if not np.isfinite(norm):
            return norm
        limit, scale = self.config.clip_norm, 1.0
        if limit is not None and norm + CLIP_EPSILON > limit:
            scale = limit / (norm + CLIP_EPSILON)
        self._updates += 1
        decay = 1 - learning_rate * self.config.weight_decay
        rate = learning_rate / (1 - BETA_1**self._updates)
        root = (1 - BETA_2**self._updates) ** 0.5
        self._update(gradient, *(tf.constant(value, tf.float32) for value in (scale, decay, rate, root)))
        return norm

    # Sums over ranks, which are collectives

    def sum(self, values: Any) -> Any:
        """Return the sum over ranks of a tensor. Whole numbers wrap."""
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, tf.convert_to_tensor(values), axis=None)

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        """Return the sums over ranks of numbers of 64 bits."""
        return [int(value) for value in self.sum(np.array(values, dtype=np.int64)).numpy()]

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """Return the sums over ranks, in float64."""
        return [float(value) for value in self.sum(np.array(values, dtype=np.float64)).numpy()]

    def gather(self, facts: RankFacts, value: int) -> list[int]:
        """Return a number of 64 bits from each rank, in order."""
        return self.sum_integers([value if rank == facts.rank else 0 for rank in range(facts.world_size)])

    # Judging

    def judge(self, inputs: Any, target: Any) -> dict[str, float]:
        """Return the sums over a batch of the loss and each metric, as `loss` and by name."""
        found = self.strategy.run(self._judge, args=(_tensors(inputs), _tensors(target)))
        return {name: float(value) for name, value in found.items()}

    # The state

    def weights_by_name(self) -> dict[str, Tensor]:
        """Return copies of the weights by name, those that are not trained included."""
        return {name: _copy(variable) for name, variable in self._named()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take over weights that `weights_by_name` has returned."""
        for name, variable in self._named():
            variable.assign(weights[name].numpy())

    def optimizer_state(self) -> dict[str, Any]:
        """Return the number of updates, and copies of the optimizer's moments by the names of the weights."""
        names = [name for name, variable in self._named() if variable.trainable]
        mean, square = ({name: _copy(one) for name, one in zip(names, all_, strict=True)} for all_ in self._moments)
        return {"updates": self._updates, "mean": mean, "square": square}

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Take over what `optimizer_state` has returned."""
        for kind, mine in zip(("mean", "square"), self._moments, strict=True):
            for variable, value in zip(mine, state[kind].values(), strict=True):
                variable.assign(value.numpy())
        self._updates = state["updates"]

    def digest(self) -> str:
        """Return the sha256 of all weights, their names and shapes."""
        result = hashlib.sha256()
        for name, tensor in self.weights_by_name().items():
            value = tensor.numpy()
            result.update(f"{name}{value.shape}{value.dtype}".encode() + value.tobytes())
        return result.hexdigest()

    # Helpers of the methods above, in the order of their use.

    def _differentiated(self, inputs: Any, target: Any, share: Any) -> tuple[Any, Any]:
        weights = [variable.value for variable in self.model.trainable_variables]
        with tf.GradientTape() as tape:
            losses = per_sample(self.loss(target, self.model(inputs, training=True)), target, "the loss")
            total = tf.reduce_sum(losses)
            scaled = total * share
        gradients = tape.gradient(scaled, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return total, tf.concat([tf.reshape(tf.convert_to_tensor(gradient), [-1]) for gradient in gradients], 0)

    def _updated(self, gradient: Any, scale: Any, decay: Any, rate: Any, root: Any) -> None:
        parts = tf.split(gradient * scale, self._sizes)
        for weight, part, mean, square in zip(self.weights, parts, *self._moments, strict=True):
            self.strategy.extended.update(
                weight, _adamw, args=(tf.reshape(part, weight.shape), mean, square, decay, rate, root)
            )

    def _judged(self, inputs: Any, target: Any) -> dict[str, Any]:
        outputs = self.model(inputs, training=False)
        figures = {"loss": self.loss, **self.metrics}
        return {
            name: tf.reduce_sum(tf.cast(per_sample(figure(target, outputs), target, name), tf.float64))
            for name, figure in figures.items()
        }

    def _named(self) -> list[tuple[str, Any]]:
        # By place: Keras numbers layers without a name by how many it has made before in this process.
        kept = [variable for variable in self.model.variables if _SEED_STATE not in variable.path]
        return [(f"{number:04d}/{variable.name}", variable) for number, variable in enumerate(kept)]


def _adamw(weight: Any, gradient: Any, mean: Any, square: Any, decay: Any, rate: Any, root: Any) -> None:
    """Update one weight as torch's AdamW does."""
    mean.assign(mean + (gradient - mean) * (1 - BETA_1))
    square.assign(square * BETA_2 + gradient * gradient * (1 - BETA_2))
    weight.assign(weight * decay - rate * mean / (tf.sqrt(square) / root + EPSILON))


def check_model(model: Any) -> None:
    """Raise `ConfigError` for what `make_model` must not return."""
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
        return {"accuracy": keras.metrics.sparse_categorical_accuracy} if loss in _CLASSES else {}
    for name in given:
        if name in RESERVED:
            raise ConfigError(f"a metric is named {name!r}, which every report already uses: give it another name")
    return given


def per_sample(values: Any, target: Any, what: str) -> Any:
    """Return one figure per sample (B,): the mean over all other dimensions. Raise `ConfigError` if there is not one
    for each."""
    values = tf.convert_to_tensor(values)
    if values.shape.rank is None or values.shape.rank == 0:
        raise ConfigError(
            f"{what} gave one number for a batch, and must give one per sample: use reduction='none'. The mean over "
            "the global batch is taken by the trainer"
        )
    if values.shape.rank > 1:
        values = tf.reduce_mean(tf.reshape(values, [tf.shape(values)[0], -1]), 1)
    tf.debugging.assert_equal(tf.shape(values)[0], tf.shape(tf.nest.flatten(target)[0])[0], f"{what}: per sample")
    return values


def _copy(variable: Any) -> Tensor:
    return torch.from_numpy(np.array(variable.numpy()))


def _tensors(parts: Any) -> Any:
    return tf.nest.map_structure(lambda part: tf.convert_to_tensor(part.numpy()), parts)
