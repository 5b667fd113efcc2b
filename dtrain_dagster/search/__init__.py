"""A search for hyperparameters: trials are trainings that differ in some fields, drawn from a space, judged as they
run, and paid by one budget.

What is drawn is in `space` and `sampling`, what a running trial may still bring in `curves` and `worth`, which trials
end early in `pruning`; `source` joins them into what a fleet of jobs asks. Training one job belongs in
`dtrain_dagster.jobs`, running many in `dtrain_dagster.fleet`.
"""
