"""The parameters of a dataset of rows, and the split that each row belongs to. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.table_columns import TASKS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "val", "validation", "dev", "development"), "valid"),
    **dict.fromkeys(("test", "testing", "holdout", "hold-out", "hold_out"), "test"),
}
"""The names of splits, in small letters."""
MOST_NAMES = 10
"""The most different values of a column that names splits. One with more says whose rows stay together."""
_SCALE = 2.0**-64


@dataclass(frozen=True, kw_only=True, slots=True)
class RowParams:
    """The parameters of a dataset besides its table."""

    target: str
    task: Literal["regression", "binary", "multiclass"] | None = None
    """None: by the target's values."""
    drop: tuple[str, ...] = ()
    """Columns that are left out."""
    split_by: str | None = None
    """A column that says the split of each row (by a name of `SPLIT_NAMES`), or whose equal values stay together; it is
    no feature. None: each row by itself."""
    valid_fraction: float = 0.1
    test_fraction: float = 0.1
    missing: Literal["refuse", "mean"] = "refuse"
    """Numbers that are missing: refused, or counted as the mean, with a further input that says so."""
    seed: int = 0
    """Of the division of rows among the splits."""
    shard_rows: int = 1 << 20
    """Rows of one shard, about."""

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise DataError(f"task = {self.task!r}: must be one of {', '.join(TASKS)}")
        valid, test = self.valid_fraction, self.test_fraction
        if not (0 < valid < 1 and 0 < test < 1 and valid + test < 1):
            raise DataError(
                f"valid_fraction = {valid} and test_fraction = {test}: each lies between 0 and 1, and their sum below 1"
            )


def hashed_shares(values: Sequence[str], seed: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each value, the same for equal values. Pure."""
    import numpy as np

    digests = (hashlib.sha256(f"{seed}/{value}".encode()).digest()[:8] for value in values)
    return np.array([int.from_bytes(digest, "little") for digest in digests], dtype=np.float64) * _SCALE


def numbered_shares(first: int, count: int, seed: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each of the rows first … first + count - 1 (splitmix64 of their numbers). Pure."""
    import numpy as np

    with np.errstate(over="ignore"):
        mixed = np.arange(first, first + count, dtype=np.uint64) + np.uint64(seed) * np.uint64(0xD1B54A32D192ED03)
        mixed = (mixed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))).astype(np.float64) * _SCALE


def splits_of(shares: NDArray[np.float64], valid: float, test: float) -> NDArray[np.int64]:
    """Return the place in `SPLITS` of rows with these shares, for these fractions of validation and test. Pure."""
    import numpy as np

    is_valid = shares >= 1 - valid - test
    return np.where(shares >= 1 - test, 2, is_valid.astype(np.int64))
