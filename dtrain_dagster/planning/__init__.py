"""What a training will take, and what else could be chosen: probes, histories, choices, limits, projections.

The prices themselves belong to `costs`, and what an asset records of a plan to `assets`.
"""
