"""The reports on a trained job: its performance report, and charts of time, costs and scaling.

The live page belongs to `dashboard`. Nothing is computed here that a decision depends on.
"""
