"""Elastic membership: which members are alive, which are in the next generation, and the world of a generation.

The collectives of a world belong in `trainer.comm`. What a training does with a new world, such as taking over a state,
belongs in `trainer.engine`.
"""
