"""The load on the machine that runs all local nodes, seen when a training is planned."""

from __future__ import annotations

import psutil

from dtrain_dagster.costs.estimate import Sizes

LISTENING_SECONDS = 1.0
"""Seconds in which the use of the cores is counted. The load averages of the system reach back a minute, in which a
probe or a training of our own may have run."""


def cores_of_others(sizes: Sizes) -> float:
    """Return how many cores of the machine are in use, counted for a second while nothing of the plan runs on it; 0
    where each node is a machine of its own, which cannot be seen from here."""
    if not sizes.cores:
        return 0.0
    return min(float(sizes.cores), psutil.cpu_percent(interval=LISTENING_SECONDS) / 100 * sizes.cores)
