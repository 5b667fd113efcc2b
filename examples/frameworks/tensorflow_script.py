"""A linear model under TensorFlow's MultiWorkerMirroredStrategy, with a loop of its own; it imports nothing of dtrain.

    dtrain launch --engine tensorflow --nodes 2 -- python examples/frameworks/tensorflow_script.py

``model.fit`` of Keras 3 does not run under this strategy; that of tf-keras does (TF_USE_LEGACY_KERAS=1).
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--fail", action="store_true", help="Let the last worker fail.")
options = parser.parse_args()

strategy = tf.distribute.MultiWorkerMirroredStrategy()
resolver = strategy.cluster_resolver
rank, size = resolver.task_id, strategy.num_replicas_in_sync
print(f"worker {rank} of {size}", flush=True)
if options.fail and rank == size - 1:
    sys.exit(7)
tf.random.set_seed(0)
with strategy.scope():
    weights = tf.Variable(tf.zeros((8, 1)))
wanted = tf.range(8, dtype=tf.float32)[:, None] / 8


@tf.function
def step(inputs):
    """Return the mean loss over all workers before one step of gradient descent."""

    def on_worker(inputs):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((inputs @ weights - inputs @ wanted) ** 2)
        gradient = tape.gradient(loss, weights)
        gradient = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradient)
        weights.assign_sub(0.1 * gradient)
        return loss

    losses = strategy.run(on_worker, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)


generator = tf.random.Generator.from_seed(1 + rank)
for number in range(options.steps):
    loss = step(generator.normal((64, 8)))
    if number % 5 == 0 and rank == 0:
        print(f"step {number} loss {loss.numpy():.4f}", flush=True)
print(f"worker {rank} loss {loss.numpy():.4f} weights {float(tf.reduce_sum(weights)):.6f}", flush=True)
