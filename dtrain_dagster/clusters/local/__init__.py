"""This machine as a cluster, whose nodes are process groups: `manager` is its interface, `supervisor` runs a job.

The supervisor starts in a moment and outlives the submitting process, so its imports must be light.
"""
