"""`Replica`: a Keras model in this rank under `MultiWorkerMirroredStrategy`: gradients, sums over ranks, the update.

What TensorFlow computes belongs here; which samples, when and at which rate is `trainer.tensorflow.loop`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from trainer.comm.launcher_env import RankFacts
from trainer.comm.world import choose_gpu
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.tensorflow.cluster import TF_CONFIG, Cluster

Figure = Callable[[Any, Any], Any]
"""``figure(target, outputs)``, in Keras' order: one number per sample."""
LOST = (
    tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError,
    tf.errors.InternalError, tf.errors.FailedPreconditionError,
)  # fmt: skip
"""What a collective raises where a peer is lost."""
BETA_1, BETA_2, EPSILON, CLIP_EPSILON = 0.9, 0.999, 1e-8, 1e-6
"""Those of torch's AdamW and `trainer.engine.step`."""
_SEED_STATE = "seed_generator_state"
_made: tuple[str, Any] | None = None
"""The cluster and the strategy of this process: TensorFlow starts its server once."""


def open_strategy(cluster: Cluster, config: DistributedTrainingConfig) -> Any:
    """Return the strategy of this process. A collective. Raise `ConfigError` where TensorFlow has begun without it, or
    for another cluster."""
    global _made
    if _made is not None:
        if _made[0] != cluster.variable():
            raise ConfigError("TensorFlow has joined other workers in this process: start a new one for each training")
        return _made[1]
    _use_one_gpu(cluster.facts)
    kinds = tf.distribute.experimental.CommunicationImplementation
    kind = {"auto": kinds.AUTO, "gloo": kinds.RING, "nccl": kinds.NCCL}[config.backend]
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=kind, timeout_seconds=config.collective_timeout_seconds
    )
    given = os.environ.get(TF_CONFIG)
    if cluster.facts.world_size > 1:
        os.environ[TF_CONFIG] = cluster.variable()
    try:
        if config.threads_per_rank is not None:
            tf.config.threading.set_intra_op_parallelism_threads(config.threads_per_rank)
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    except RuntimeError as error:
        raise ConfigError(
            "TensorFlow has already computed in this process, and can join other workers only before that: make "
            f"tensors and models in make_model ({error})"
        ) from None
    finally:
        if given is None:
            os.environ.pop(TF_CONFIG, None)
    _made = cluster.variable(), strategy
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
        self, make_model: Callable[[], Any], strategy: Any, config: DistributedTrainingConfig,
    ) -> None:  # fmt: skip
        """Make the model under the strategy, from the seed of the training; rank 0's weights count. A collective. Raise
        `ConfigError` for a model that cannot be trained so."""
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
        self.updates = 0
        self._seeds = [item for item in self.model.non_trainable_variables if _SEED_STATE in item.path]
        self._sizes = [int(np.prod(weight.shape)) for weight in self.weights]
        self._judge = tf.function(self._judged, autograph=False, reduce_retracing=True)
        self._differentiate = tf.function(self._differentiated, autograph=False, reduce_retracing=True)
        self._update = tf.function(self._updated, autograph=False)
        self.loss: Figure = lambda target, outputs: tf.constant(0.0)
        self.metrics: Mapping[str, Figure] = {}

    @property
    def device(self) -> str:
        """The kind of device that computes."""
        return "cuda" if tf.config.get_visible_devices("GPU") else "cpu"

    def set_task(self, loss: Figure, metrics: Mapping[str, Figure]) -> None:
        """Set what is minimised and what is judged beside it, before the first batch."""
        self.loss, self.metrics = loss, metrics

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
        self.updates += 1
        decay = 1 - learning_rate * self.config.weight_decay
        rate = learning_rate / (1 - BETA_1**self.updates)
        root = (1 - BETA_2**self.updates) ** 0.5
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

    def state(self) -> dict[str, NDArray[Any]]:
        """Return copies of the weights by name, those that are not trained included."""
        return {name: np.array(variable.numpy()) for name, variable in self._named()}

    def moments(self) -> dict[str, dict[str, NDArray[np.float32]]]:
        """Return copies of the optimizer's moments by name."""
        names = [name for name, variable in self._named() if variable.trainable]
        return {
            kind: {name: np.array(moment.numpy()) for name, moment in zip(names, moments, strict=True)}
            for kind, moments in zip(("mean", "square"), self._moments, strict=True)
        }

    def load(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Take over weights that `state` has returned."""
        for name, variable in self._named():
            variable.assign(weights[name])

    def load_moments(self, moments: Mapping[str, Mapping[str, NDArray[Any]]], updates: int) -> None:
        """Take over moments that `moments` has returned after so many updates."""
        for kind, mine in zip(("mean", "square"), self._moments, strict=True):
            for variable, value in zip(mine, moments[kind].values(), strict=True):
                variable.assign(value)
        self.updates = updates

    def digest(self) -> str:
        """Return the sha256 of all weights, their names and shapes."""
        result = hashlib.sha256()
        for name, value in self.state().items():
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


def _tensors(parts: Any) -> Any:
    return tf.nest.map_structure(tf.convert_to_tensor, parts)
