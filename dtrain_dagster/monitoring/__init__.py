"""The meaning of a job's events: stragglers, hangs, memory, communication, scaling, and what would help. Pure.

It imports no other folder of this package: no dollars, no clusters, no Dagster. Notifying people belongs in `assets`.
"""
