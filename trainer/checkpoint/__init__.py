"""Checkpoints of the run directory: staged, written in the background, verified before they count, and cleaned up.

What makes up the state that is saved does not belong here, see `trainer.engine.state`; neither does the final model,
see `trainer.model.saved_model`.
"""
