"""Many jobs under one budget: which run now, on how many nodes, which wait, are paused or ended. Decisions are in
`scheduling` (pure), what is remembered in `records`, what is done in `runner`; where jobs come from is a `JobSource`.

One training alone belongs in `dtrain_dagster.jobs`.
"""
