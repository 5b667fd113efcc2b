"""What is decided without a person: when to retrain, who waits for nodes, which run has died, which cluster idles.

Sensors and assets ask these modules. What Dagster calls on a clock belongs to `sensors`.
"""
