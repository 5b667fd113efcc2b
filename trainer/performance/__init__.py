"""Pure models of the time of a message and of a sum over ranks, and of the memory that a rank needs, shared by
training, advice and the benchmark of scaling.

Measurements, and decisions from the models, do not belong here: see `trainer.observability` and
`dtrain_dagster.monitoring`.
"""
