"""Sharing gradients among ranks: buckets, sums during the backward pass, compression.

The connections that carry the sums belong to `trainer.comm`.
"""
