"""A search for hyperparameters: trials are trainings that differ in some fields, drawn from a space, judged as they
run, and paid by one budget.

What may be drawn is in `space`, which trials end early in `trials`; `source` draws them, and joins both into what a
fleet of jobs asks, whose record has the trials. Training one job belongs in `dtrain_dagster.jobs`, running many in
`dtrain_dagster.fleet`.
"""
