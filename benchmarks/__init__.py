"""Measurements: each `python -m benchmarks.NAME` prints one line of JSON; what was measured is in `results/`.

A benchmark asserts nothing: what has to hold is tested under `tests`. `frameworks` trains side by side with others for
`throughput`, `abuse` attacks; `host`, `namespaces` and `sharding_programs` serve several or large benchmarks.
"""
