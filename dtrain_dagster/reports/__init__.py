"""The reports on a trained job: its performance report, and charts of time and costs.

The live page belongs to `dashboard`. Nothing is computed here that a decision depends on.
"""
