"""Sharing gradients among ranks: buckets, sums during the backward pass, compression, and the flat optimizer.

The connections that carry the sums belong to `trainer.comm`.
"""
