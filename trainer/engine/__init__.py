"""The training itself: its loop, the optimizer step, its state, and how it recovers, keeps to its budget and ends.

What can be told without knowing of a whole training belongs in the other packages, which do not import this one;
`trainer.tuning` does, which is a door of its own.
"""
