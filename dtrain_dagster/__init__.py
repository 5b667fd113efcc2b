"""The orchestrator: a Dagster asset graph, and the command line `dtrain`, that train models on GPU clusters.

Its packages are layers in this order, and none imports one above it: `support` and `monitoring`; `settings`; `costs`;
`clusters`; `jobs`; `registry`; `data`, `automation` and `planning`; `reports` and `web`; `dashboard`; `assets`;
`sensors`; `pipelines`; `cli`, `components` and `definitions`. Code that runs on nodes belongs to the package `trainer`,
which never imports this one.
"""
