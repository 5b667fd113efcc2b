"""This machine as a cluster, whose nodes are process groups: `manager` is what the rest uses, `supervisor` runs a job.

The supervisor starts in a moment and outlives whoever submitted: what it imports must be light.
"""
