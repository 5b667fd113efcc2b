"""What a strategy does with gradients and parameters: buckets, sums during the backward pass, compression, sharded
models, DeepSpeed's engine.

The connections that carry the sums belong to `trainer.comm`; the steps of each strategy are in `trainer.engine`.
"""
