"""What Dagster calls on a clock: each sensor looks, asks `automation` or a cluster what is due, and tells people.

What can be decided without a tick does not belong here.
"""
