"""The sensors that Dagster calls on a clock. Each looks, asks `automation` or a cluster what is due, and tells people.

Decisions that need no tick do not belong here.
"""
