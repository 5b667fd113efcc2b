"""What a ``correction`` in a ``model.json`` may be: numbers for arguments of a loss that were found after the training
(`trainer.model.calibration`). Without torch: the orchestrator asks this of what nodes wrote."""

from __future__ import annotations

import math


def is_correction(value: object) -> bool:
    """Return whether a value read from JSON is finite numbers by name. Pure."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(number, float) and math.isfinite(number) for name, number in value.items()
    )
