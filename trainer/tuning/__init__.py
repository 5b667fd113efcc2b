"""Auto-tuning: a job that measures settings on its own nodes, and the decisions of what to try next.

Whether and where measured settings are used afterwards does not belong here: the orchestrator decides that.
"""
