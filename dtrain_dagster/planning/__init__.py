"""The expected cost of a training and its alternatives: probes, histories, choices, limits, projections.

The prices themselves belong in `costs`, and what an asset records of a plan in `assets`.
"""
