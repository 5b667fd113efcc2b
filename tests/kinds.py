"""Small datasets of rows, built by the product itself, for tests of both packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from dtrain_dagster.data.build_once import BuiltDataset
from dtrain_dagster.data.rows import RowParams, build_rows

WORDS = ("red", "green", "blue")


def table(rows: int = 1200, seed: int = 0) -> pd.DataFrame:
    """Numbers and a category, from which a number, one of two and one of three classes follow but for some noise."""
    random = np.random.default_rng(seed)
    x, y = random.normal(5, 3, rows), random.normal(-1, 0.5, rows)
    colour = random.integers(0, 3, rows)
    score = (x - 5) / 3 - 2 * (y + 1) + 1.5 * (colour == 1) + 0.3 * random.standard_normal(rows)
    return pd.DataFrame({
        "x": x, "y": y, "colour": [WORDS[code] for code in colour], "value": 100 + 20 * score,
        "bought": np.where(score > 0.3, "yes", "no"), "level": np.digitize(score, [-0.5, 1.0]),
    })  # fmt: skip


def build_table(folder: Path, target: str = "bought", frame: pd.DataFrame | None = None, **params: Any) -> BuiltDataset:
    """A dataset of one target; the others are left out."""
    frame = table() if frame is None else frame
    frame.to_parquet(folder / "table.parquet", row_group_size=500)
    others = {"value", "bought", "level"} - {target}
    drop = tuple(sorted(others & set(frame.columns)))
    return build_rows(str(folder / "table.parquet"), str(folder), RowParams(target=target, drop=drop, **params))


def stored_rows(made: Any) -> dict[str, pd.DataFrame]:
    """The rows of each split, standardised."""
    shards = made.manifest()["shards"]
    return {
        split: pd.concat([pq.read_table(Path(made.uri, s["path"])).to_pandas() for s in shards if s["split"] == split])
        for split in ("train", "valid", "test")
    }


def original_rows(made: Any) -> dict[str, pd.DataFrame]:
    """The same, as numbers were before they were stored."""
    scales, found = made.manifest()["normalisation"]["features"], stored_rows(made)
    for rows in found.values():
        for name, scale in scales.items():
            rows[name] = rows[name].astype(np.float64) * scale["std"] + scale["mean"]
    return found
