"""SLURM: nodes of a training as one-node jobs of a cluster, over SLURM's own commands, here or on a login node.

What every engine has in common belongs in `dtrain_dagster.clusters.supervision`.
"""
