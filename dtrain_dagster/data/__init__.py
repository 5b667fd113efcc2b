"""The way from prices to shards: sources, checks, features and the files that nodes read.

The nodes' reading of these files belongs to `trainer.data`.
"""
