"""Models and losses: the stock ones and a user's own, how they are built, compiled, saved, loaded and served.

How gradients of a model are summed does not belong here, see `trainer.parallel`; neither does judging its forecasts,
see `trainer.evaluation`.
"""
