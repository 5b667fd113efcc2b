"""Data made to pass for other data, to leave its folder, or to fill memory: a dataset, and what is wrong with it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dtrain_dagster.data.prices import iter_tickers, write_prices
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.sources import PriceFile
from dtrain_dagster.data.validation import validate_prices

IDS: tuple[Any, ...] = (
    "../photos", "..", ".", "", "/tmp/photos", "a/../../photos", "a/b", "~", "-rf", "a\0b", "a\nb", "x" * 300, None, 7,
    ["photos"],
)  # fmt: skip
"""Ids of datasets that must be refused."""
SHARD_PATHS: tuple[Any, ...] = (
    "/etc/passwd", "../../canary.txt", "data/../../canary.txt", "", "data//x", "data/./x", "file:///etc/passwd", None,
    "data\\x", "http://127.0.0.1:9/x",
)  # fmt: skip
"""Paths of shards that must be refused."""


def csv_of(close: float, tickers: int = 2, days: int = 3) -> bytes:
    """Return a price file whose first close is ``close``."""
    rows = ["date,ticker,adj_close"]
    rows += [f"2020-01-{day + 1:02},T{ticker},{close + day}" for ticker in range(tickers) for day in range(days)]
    return "\n".join(rows).encode() + b"\n"


def first_close(ref: Any) -> float:
    """Return the first close of the first ticker in imported prices."""
    return float(next(iter(iter_tickers(ref)))[1]["adj_close"].iloc[0])


def dataset(folder: Path) -> Path:
    """Build a small dataset of random walks with the product's own code."""
    walk = np.random.default_rng(0)
    days = pd.bdate_range("2015-01-01", periods=700).strftime("%Y-%m-%d")
    frame = pd.DataFrame({"date": days})
    for ticker in ("AAA", "BBB"):
        frame[ticker] = 50 * np.exp(np.cumsum(0.01 * walk.standard_normal(len(days))))
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_csv(folder / "walk.csv", index=False)
    ref = write_prices(PriceFile(str(folder / "walk.csv")), str(folder))
    built = build_dataset(ref, validate_prices(ref, None), str(folder), DatasetParams(window=20, shards=2), None)
    return Path(built.uri)


def changed(uri: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Return a copy of the dataset whose manifest was changed."""
    shutil.copytree(uri, target)
    manifest = json.loads((target / "manifest.json").read_text())
    change(manifest)
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


def with_value(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change of a manifest: the last one is the value, the others lead to its place."""
    *way, last, value = path

    def change(manifest: dict[str, Any]) -> None:
        node: Any = manifest
        for step in way:
            node = node[step]
        node[last] = value

    return change


def manifests() -> dict[str, Callable[[dict[str, Any]], None]]:
    """Return changes that make a manifest wrong, by description."""
    segment = ("shards", 0, "segments", 0)
    made = {f"dataset_id {value!r}": with_value("dataset_id", value) for value in IDS}
    made |= {f"path {value!r}": with_value("shards", 0, "path", value) for value in SHARD_PATHS}
    for column in ("../../photos/1", "features", "a/b", "", None):
        made[f"column {column!r}"] = with_value("columns", 2, "name", column)
    for window in (0, -5, 10**9, 1.5, "60", None, math.nan):
        made[f"window {window!r}"] = with_value("window", window)
    for number in (0.5, True, math.nan):
        made[f"a segment from row {number!r}"] = with_value(*segment, "rows", 0, number)
        made[f"samples from {number!r}"] = with_value(*segment, "samples", "train", 0, number)
    for far in (10**6, 2**63, -1):
        made[f"rows {far}"] = with_value("shards", 0, "rows", far)
        made[f"a segment to {far}"] = with_value(*segment, "rows", [0, far])
        made[f"samples to {far}"] = with_value(*segment, "samples", "train", [30, far])
    made |= {
        "samples before the first window": with_value(*segment, "samples", "train", [0, 30]),
        "samples of other rows": with_value(*segment, "samples", "train", [-300, -30]),
        "a mean that is no number": with_value("normalisation", "target", "mean", math.nan),
        "a deviation of zero": with_value("normalisation", "target", "std", 0.0),
        "no shards": with_value("shards", None),
        "shards of text": with_value("shards", ["x"]),
        "no splits": with_value("splits", {"train": {}, "other": {}}),
        "other rows": with_value("shards", 0, "rows", 3),
        "another digest": with_value("shards", 0, "sha256", "0" * 64),
        "tickers of numbers": with_value("shards", 0, "tickers", [1, 2]),
        "other tickers": with_value("shards", 0, "tickers", ["ZZZ"]),
    }
    return made
