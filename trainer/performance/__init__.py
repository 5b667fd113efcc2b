"""Pure models of the time of a message, a sum over ranks and a step, shared by training, advice and the scaling study.

Measurements, and decisions from the models, do not belong here: see `trainer.observability` and
`dtrain_dagster.monitoring`.
"""
