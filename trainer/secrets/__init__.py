"""Secrets: references to them, fetching them where they are used, and striking them out of what is written.

The secret of a launch, which ranks prove to each other, does not belong here, see `trainer.comm.launch_secret`.
"""
