"""Measurements: each `python -m benchmarks.NAME` prints one line of JSON, and `results` keeps the saved lines.

A benchmark asserts nothing: what must hold is tested under `tests`. `frameworks` trains side by side with other
frameworks for `throughput`, `host` has what all share, and `launchers`, `fleet_simulation` and `azure_faults_…` are
parts of the benchmarks that import them.
"""
