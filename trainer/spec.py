"""The description of a dataset that models and losses are made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """The shape and scale of one dataset, from its manifest; every model and loss factory gets it.

    A model gets batches of shape (batch, window, len(features)), float32, already standardised with ``feature_mean``
    and ``feature_std``; the target has shape (batch,), float32, in its own unit.
    """

    dataset_id: str
    features: tuple[str, ...]
    """Names of the input columns, in order."""
    window: int
    """Rows (trading days) in one sample."""
    horizon: int
    """Rows from the end of a sample to its target."""
    feature_mean: tuple[float, ...]
    """Mean of each feature over the training split."""
    feature_std: tuple[float, ...]
    target: str
    """Name of the target column, such as ``target_return``."""
    target_mean: float
    target_std: float
    """Standard deviation of the target over the training split: the natural unit of a prediction."""


def spec_of(manifest: Mapping[str, Any]) -> DataSpec:
    """Return the description that a manifest gives to models. Pure."""
    norm, columns = manifest["normalisation"], manifest["columns"]
    features = tuple(column["name"] for column in columns if column["role"] == "feature")
    [target] = [column["name"] for column in columns if column["role"] == "target"]
    return DataSpec(
        dataset_id=manifest["dataset_id"],
        features=features,
        window=manifest["window"],
        horizon=manifest["horizon"],
        feature_mean=tuple(norm["features"][name]["mean"] for name in features),
        feature_std=tuple(norm["features"][name]["std"] for name in features),
        target=target,
        target_mean=norm["target"]["mean"],
        target_std=norm["target"]["std"],
    )
