"""A time series of bounded length: what the page's curves are made of."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

POINTS = 1000
"""The most rows of a track."""

Row = dict[str, float]


@dataclass(slots=True)
class Track:
    """The rows of a series over ``x`` (``step`` or ``time``). When there are too many, neighbours are merged into
    means.

    Each row has the version of the dashboard that changed it last, so that a reader can ask for the new rows.
    """

    x: str
    rows: list[Row] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stride: int = 1
    """The number of samples in a row."""
    filled: int = 0
    """The number of samples in the last row."""

    def add(self, values: Mapping[str, Any], version: int, most: int) -> None:
        """Add a sample. A repeated step replaces its earlier sample; a value that is not a number is left out."""
        sample = {name: float(value) for name, value in values.items() if is_number(value)}
        while self.x == "step" and self.rows and self.rows[-1]["step"] >= sample["step"]:
            self.rows.pop()
            self.versions.pop()
            self.filled = self.stride
        if self.rows and self.filled < self.stride:
            self.rows[-1] = merged(self.rows[-1], sample, self.filled, self.x)
            self.filled += 1
        else:
            self.rows.append(sample)
            self.versions.append(version)
            self.filled = 1
        self.versions[-1] = version
        if len(self.rows) > max(most, 2):
            self._halve(version)

    def since(self, version: int) -> dict[str, Any] | None:
        """Return the rows that changed after ``version``; they replace all rows from an index on. None if none did."""
        first = bisect_right(self.versions, version)
        return {"from": first, "rows": self.rows[first:]} if first < len(self.rows) else None

    def _halve(self, version: int) -> None:
        pairs = [self.rows[at : at + 2] for at in range(0, len(self.rows), 2)]
        self.rows = [merged(pair[0], pair[1], 1, self.x) if len(pair) == 2 else pair[0] for pair in pairs]
        self.versions = [version] * len(self.rows)
        self.filled += self.stride if len(pairs[-1]) == 2 else 0
        self.stride *= 2


def is_number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def merged(row: Row, sample: Row, weight: int, x: str) -> Row:
    """Return the mean of a row of ``weight`` samples and one more; its position is that of the last."""
    mean = {name: row[name] + (sample[name] - row[name]) / (weight + 1) for name in row.keys() & sample.keys()}
    return {**row, **sample, **mean, x: sample[x]}
