"""Measurements: each `python -m benchmarks.NAME` prints one line of JSON, and `results` keeps the saved lines.

A benchmark asserts nothing: what must hold is tested under `tests`. `frameworks` trains side by side with other
frameworks for `throughput`; `host`, `launchers`, `scaling_figures` and `search_policies` are parts of benchmarks.
"""
