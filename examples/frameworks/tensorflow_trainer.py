"""A small Keras model, trained by `trainer.TensorFlowDistributedTrainer`.

    pip install tensorflow
    python examples/frameworks/tensorflow_trainer.py

On several ranks, which any launcher may start, with a run directory that all of them see as the first argument:

    torchrun --nproc-per-node 2 examples/frameworks/tensorflow_trainer.py RUN_DIR
"""

from __future__ import annotations

import sys

import keras
from random_walk import make_windows

from trainer import DistributedConfig, TensorFlowDistributedTrainer


def main() -> None:
    """Train, and print the loss on the test split."""
    spec, (train, valid, test) = make_windows()

    def make_model() -> keras.Model:
        scale = keras.layers.Normalization(mean=spec.feature_mean, variance=[std**2 for std in spec.feature_std])
        windows = keras.Input((spec.window, len(spec.features)))
        hidden = keras.layers.Dense(32, "relu")(keras.layers.Flatten()(scale(windows)))
        # The mean and the log of the spread of the next day's return.
        return keras.Model(windows, keras.layers.Dense(2, kernel_initializer="zeros")(hidden))

    def loss(target: keras.KerasTensor, outputs: keras.KerasTensor) -> keras.KerasTensor:
        """Return the negative log density of a normal distribution, of each sample."""
        log_spread = keras.ops.clip(outputs[:, 1], -5.0, 5.0)
        error = target / spec.target_std - outputs[:, 0]
        return log_spread + 0.5 * (error / keras.ops.exp(log_spread)) ** 2

    config = DistributedConfig(epochs=3, batch_size_per_gpu=32, gradient_accumulation_steps=2)
    run_dir = sys.argv[1] if len(sys.argv) > 1 else None
    result = TensorFlowDistributedTrainer(make_model, config, loss=loss, run_dir=run_dir).fit(train, valid, test)
    print(f"test loss {result.test['loss']:.4f} after {result.steps} steps, in {result.run_dir}")


if __name__ == "__main__":
    main()
