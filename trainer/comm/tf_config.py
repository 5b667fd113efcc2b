"""``TF_CONFIG``, from which TensorFlow reads the workers of a training and the place of a process among them. Pure; no
TensorFlow. How ranks learn each other's addresses belongs to who starts them."""

from __future__ import annotations

import json
from collections.abc import Sequence

TF_CONFIG = "TF_CONFIG"
"""TensorFlow's variable: the addresses of all workers as JSON, and which of them this process is."""


def describe_workers(rank: int, workers: Sequence[str]) -> str:
    """Return the variable's value for one rank. ``workers``: HOST:PORT of each rank, in order. The chief, which writes
    what only one writes, is worker 0."""
    return json.dumps({"cluster": {"worker": list(workers)}, "task": {"type": "worker", "index": rank}})
