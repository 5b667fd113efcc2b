"""What is said of a dataset of windows, for models and losses that need none."""

from __future__ import annotations

from typing import Any

from trainer.spec import DataSpec


def window_spec(features: str, window: int, **more: Any) -> DataSpec:
    """A feature for each letter, standardised already."""
    count = len(features)
    given = {"feature_mean": (0.0,) * count, "feature_std": (1.0,) * count, "target_mean": 0.0, **more}
    return DataSpec(
        dataset_id="d", features=tuple(features), window=window, horizon=5, target="target_return", target_std=0.04,
        **given,
    )  # fmt: skip
