"""Decisions that need no person: when to retrain, which waiting run starts, which run has died, which cluster idles.

Sensors and assets ask these modules. What Dagster calls on a clock belongs to `sensors`.
"""
