"""The stock model's twin in Keras, trained by TensorFlow's strategy: `trainer.TensorFlowDistributedTrainer`.

    pip install tensorflow
    python examples/frameworks/tensorflow_trainer.py

On several ranks, which any launcher may start, with a run directory that all of them see as the first argument:

    torchrun --nproc-per-node 2 examples/frameworks/tensorflow_trainer.py RUN_DIR
"""

from __future__ import annotations

import sys

from random_walk import make_windows

from trainer import DistributedConfig, TensorFlowDistributedTrainer
from trainer.tensorflow.stock_twin import stock_twin, student_t


def main() -> None:
    """Train, and print the loss on the test split."""
    spec, (train, valid, test) = make_windows()
    config = DistributedConfig(epochs=3, batch_size_per_gpu=32, gradient_accumulation_steps=2)
    run_dir = sys.argv[1] if len(sys.argv) > 1 else None
    trainer = TensorFlowDistributedTrainer(
        lambda: stock_twin(spec), config, loss=student_t(spec), run_dir=run_dir
    )  # fmt: skip
    result = trainer.fit(train, valid, test)
    print(f"test loss {result.test['loss']:.4f} after {result.steps} steps, in {result.run_dir}")


if __name__ == "__main__":
    main()
