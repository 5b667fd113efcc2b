"""Attacks on this project, each made from a seed: the number of attempts, and those that succeeded.

Each module with a function ``attack`` is one campaign; `forks` and `tally` serve them.
"""
