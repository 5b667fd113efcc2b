"""Measurements: each `python -m benchmarks.NAME` prints one line of JSON; what was measured is in `results/`."""
