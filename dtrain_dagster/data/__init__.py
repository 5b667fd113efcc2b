"""From prices to shards: sources, checks, features and the files that nodes read.

How nodes read them belongs to `trainer.data`.
"""
