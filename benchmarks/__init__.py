"""Measurements: each `python -m benchmarks.NAME` prints one line of JSON, and `results` keeps the saved lines.

A benchmark asserts nothing: what must hold is tested under `tests`. `frameworks` trains side by side with other
frameworks for `throughput`, and `abuse` attacks the project. `host`, `namespaces`, `launchers`, `stranger`, `leaks`,
`run_directory_readers`, `scaling_figures` and `sharding_programs` are parts of benchmarks and of tests; `pictures`
draws saved results.
"""
