"""What a job's events mean: stragglers, hangs, memory, communication, scaling, and what would help. Pure.

It imports no other folder of this package: no dollars, no clusters, no Dagster. Who is told belongs to `assets`.
"""
