"""How long a message, a sum over ranks and a step take: pure models that training, advice and the scaling study share.

What is measured, and what is decided from the models, does not belong here: see `trainer.observability`,
`trainer.parallel.auto_compression` and `dtrain_dagster.monitoring`.
"""
