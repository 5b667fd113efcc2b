"""Decisions that need no person: when to retrain, which waiting run starts, which run may be about to use
nodes.

Sensors and assets ask these modules. What Dagster calls on a clock belongs to `sensors`.
"""
