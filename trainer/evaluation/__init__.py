"""The evaluation of a model: forecasts over a split, scores, baselines, the report, and the decision on promotion.

Losses, which training minimises, do not belong here, see `trainer.model.losses`; neither does the registry of models,
which the orchestrator keeps.
"""
