"""The descriptions of datasets that models and losses are made for, one for each kind of dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WINDOWS, ROWS = "windows", "rows"
KINDS = (WINDOWS, ROWS)
"""The kinds of datasets that have a manifest."""
LANGUAGE_MODEL = "a language model has become a script of its own, as examples/language_model shows"
"""What is said of the datasets of tokens and their model, which older versions had."""
OWN = "own"
"""The kind of a dataset that a function of the user's own makes on each node."""
REGRESSION, BINARY, MULTICLASS = "regression", "binary", "multiclass"
"""The tasks of a table."""
RAW_TYPES = ("number", "integer", "boolean", "string", "datetime")
"""The types of a table's columns as people have them."""
DATE_NUMBERS, DATE_CATEGORIES = ("year", "day"), ("month", "weekday", "hour")
"""The parts of a date beside its time since 1970: those stored as numbers, and those stored as categories."""
LEAST_STEP = 1e-3
"""The difference of two numbers of a table, in deviations of their column, that no part may lose by rounding."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class RawColumn:
    """A column of a table as people have it, which a registered model takes by its name."""

    name: str
    type: str
    """One of `RAW_TYPES`."""
    missing: bool
    """Whether a row may lack its value: some row of the table did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSpec:
    """The columns and scales of one table, from its manifest; every model and loss factory for rows gets it.

    A model gets rows as `trainer.model.rows.RowInputs` encodes them: shape (batch, inputs), float32, standardised. A
    target has the shape (batch,): a number in its own unit, float64, or the code of a class, int64.
    """

    dataset_id: str
    features: tuple[str, ...]
    """Names of the stored columns, in order."""
    categories: tuple[tuple[str, ...], ...]
    """The values of each column that is a category; () for a number."""
    has_missing: tuple[bool, ...]
    """Whether a column of numbers has a further input, which says that a number is missing: some row of the training
    split lacks one."""
    feature_mean: tuple[float, ...]
    """Mean of each column of numbers over the training split; 0 for a category."""
    feature_std: tuple[float, ...]
    target: str
    """Name of the target column."""
    task: str
    """``regression``, ``binary`` or ``multiclass``."""
    classes: tuple[str, ...]
    """The names of the classes by code; () for a regression."""
    target_mean: float
    target_std: float
    """Standard deviation of the target over the training split; 1 for classes."""
    raw: tuple[RawColumn, ...] = ()
    """The columns of the table that stored columns are made of."""
    sources: tuple[str, ...] = ()
    """The name in ``raw`` of the column that each stored column is made of."""
    parts: tuple[str, ...] = ()
    """The part of a date that each stored column is; "" for the column itself, of a date the days since 1970."""

    @property
    def may_miss(self) -> tuple[bool, ...]:
        """Whether a stored column of numbers may lack some: a row of any split does."""
        gaps = {column.name for column in self.raw if column.missing}
        sources = self.sources or self.features
        return tuple(has or name in gaps for has, name in zip(self.has_missing, sources, strict=True))

    @property
    def inputs(self) -> int:
        """The width of an encoded row: one for each number, one more where it may be missing, one for each value of a
        category."""
        columns = zip(self.categories, self.has_missing, strict=True)
        return sum(len(values) or 1 + missing for values, missing in columns)


def row_spec_of(manifest: Mapping[str, Any]) -> RowSpec:
    """Return the description that the manifest of a table gives to models. Pure."""
    norm, columns = manifest["normalisation"], manifest["columns"]
    features = [column for column in columns if column["role"] == "feature"]
    [target] = [column["name"] for column in columns if column["role"] == "target"]
    raw = tuple(RawColumn(**column) for column in manifest.get("inputs", ()))
    return RowSpec(
        dataset_id=manifest["dataset_id"],
        features=tuple(column["name"] for column in features),
        categories=tuple(tuple(column.get("values", ())) for column in features),
        has_missing=tuple(bool(column.get("missing", False)) for column in features),
        feature_mean=tuple(norm["features"][column["name"]]["mean"] for column in features),
        feature_std=tuple(norm["features"][column["name"]]["std"] for column in features),
        target=target,
        task=manifest["task"],
        classes=tuple(manifest["classes"]),
        target_mean=norm["target"]["mean"],
        target_std=norm["target"]["std"],
        raw=raw,
        sources=tuple(column.get("of", column["name"]) for column in features) if raw else (),
        parts=tuple(column.get("part", "") for column in features) if raw else (),
    )


def spec_of(manifest: Mapping[str, Any]) -> DataSpec:
    """Return the description that the manifest of a dataset of windows gives to models. Pure."""
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
