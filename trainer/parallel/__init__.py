"""How ranks share gradients: buckets, summing during the backward pass, compression, and the flat optimizer.

The connections over which they are summed do not belong here, see `trainer.comm`.
"""
