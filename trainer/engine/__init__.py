"""The training itself: its loop, the optimizer step, its state, recovery, the budget and the end.

What needs no knowledge of a whole training belongs in the other packages, which do not import this one; only
`trainer.tuning`, an entry point of its own, does.
"""
