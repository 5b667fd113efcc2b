"""The kinds of datasets, and the checks of a manifest's figures that are of one kind.

Checks raise plain ValueError, KeyError or TypeError, to which `trainer.data.manifest` adds the file and the remedy.
Nothing here reads a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.documents.places import checked_name
from trainer.spec import (
    BINARY,
    KINDS,
    LANGUAGE_MODEL,
    MULTICLASS,
    REGRESSION,
    ROWS,
    WINDOWS,
    DataSpec,
    RowSpec,
    row_spec_of,
    spec_of,
)

SPLITS = ("train", "valid", "test")
ARRAYS = ("features", "target", "ticker", "date")
"""Arrays that every dataset of windows has; other columns are called as they are."""
MOST_CLASSES = 10_000
_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_LONGEST_WINDOW = 100_000
_LONGEST_NAME = 200


def kind_of(manifest: Mapping[str, Any]) -> str:
    """Return the kind of a dataset: ``windows`` where its manifest, of an older version, does not say. Raise ValueError
    for one that this version does not know."""
    kind = manifest.get("kind", WINDOWS)
    if kind not in KINDS:
        known = LANGUAGE_MODEL if kind == "tokens" else f"known are {', '.join(KINDS)}"
        raise ValueError(f"kind = {str(kind)[:40]!r}: {known}")
    return kind


def describe(manifest: Mapping[str, Any]) -> DataSpec | RowSpec:
    """Return the description that a manifest gives to models, by its kind. Pure."""
    return row_spec_of(manifest) if kind_of(manifest) == ROWS else spec_of(manifest)


def check_windows(manifest: Mapping[str, Any]) -> None:
    """Raise ValueError where the figures of a dataset of windows do not fit together."""
    window = whole(manifest["window"], "window", least=1, most=_LONGEST_WINDOW)
    whole(manifest["horizon"], "horizon", least=0, most=_LONGEST_WINDOW)
    _check_columns(manifest)
    for shard in manifest["shards"]:
        _check_shard_of_windows(shard, tuple(manifest["splits"]), window)


def check_rows(manifest: Mapping[str, Any]) -> None:
    """Raise ValueError where the figures of a table do not fit together."""
    task, classes, columns = manifest["task"], manifest["classes"], manifest["columns"]
    names = [column["name"] for column in columns]
    roles = [column["role"] for column in columns]
    if len(set(names)) < len(names) or not all(_is_name(name) for name in names):
        raise ValueError(f"columns are texts of at most {_LONGEST_NAME} characters, each name once")
    if roles.count("target") != 1 or roles.count("feature") != len(roles) - 1 or len(roles) < 2:
        raise ValueError("columns: one target, and features")
    fits = {REGRESSION: len(classes) == 0, BINARY: len(classes) == 2, MULTICLASS: 2 < len(classes) <= MOST_CLASSES}
    if not fits.get(task, False) or not all(_is_name(name) for name in classes) or len(set(classes)) < len(classes):
        raise ValueError(f"task = {str(task)[:40]!r} with {len(classes)} classes, which are texts, each once")
    for column in columns:
        if column["role"] != "feature":
            continue
        if column["type"] not in ("number", "category"):
            raise ValueError(f"the type of {column['name']!r} is neither number nor category")
        values = column.get("values", [])
        if (column["type"] == "category") != bool(values) or not all(isinstance(value, str) for value in values):
            raise ValueError(f"{column['name']!r}: a category has values, which are texts, and a number has none")
        if not isinstance(column.get("missing", False), bool):
            raise ValueError(f"{column['name']!r}: missing is neither true nor false")
        _check_moments(manifest["normalisation"]["features"][column["name"]])
    _check_moments(manifest["normalisation"]["target"])
    _check_row_shards(manifest)


def shards_by_split(manifest: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the shards of each split, in order. Of rows each shard belongs to one."""
    return {split: [shard for shard in manifest["shards"] if shard["split"] == split] for split in SPLITS}


def split_ranges(manifest: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the first row of each split, and the row after its last, where the rows of all splits lie one after the
    other."""
    found, first = {}, 0
    for split, shards in shards_by_split(manifest).items():
        last = first + sum(shard["rows"] for shard in shards)
        found[split], first = (first, last), last
    return found


def whole(value: Any, what: str, least: int, most: int = 1 << 40) -> int:
    """Return the value if it is a whole number of this range. Raise ValueError, which begins with ``what``."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{what} = {str(value)[:40]}, which is no whole number from {least} to {most}")
    return value


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME and value.isprintable()


def _check_moments(figures: Mapping[str, Any]) -> None:
    if not math.isfinite(figures["mean"]) or not math.isfinite(figures["std"]) or figures["std"] <= 0:
        raise ValueError("normalisation: every mean is a number, every std one above zero")


def _check_row_shards(manifest: Mapping[str, Any]) -> None:
    order = [SPLITS.index(shard["split"]) for shard in manifest["shards"]]
    if order != sorted(order):
        raise ValueError("shards are in the order of their splits: train, valid, test")
    for shard in manifest["shards"]:
        checked_name(shard["path"], "the path of a shard")
        whole(shard["rows"], "rows", least=0)
    for split, shards in shards_by_split(manifest).items():
        if manifest["samples"][split] != sum(shard["rows"] for shard in shards):
            raise ValueError("samples are not the rows of the shards")


def _check_columns(manifest: Mapping[str, Any]) -> None:
    columns: Sequence[Mapping[str, Any]] = manifest["columns"]
    names = [column["name"] for column in columns]
    if len(set(names)) < len(names) or not all(_COLUMN.fullmatch(name) for name in names):
        raise ValueError("columns are letters, digits and underscores, each name once")
    roles = {column["name"]: column["role"] for column in columns}
    reserved = [name for name in ARRAYS if roles.get(name, "key") in ("auxiliary", "price")]
    if reserved or list(roles.values()).count("target") != 1 or "feature" not in roles.values():
        raise ValueError(f"columns: one target, some features, none of them called {', '.join(ARRAYS)}")
    fitted = manifest["normalisation"]
    for figures in (*(fitted["features"][name] for name, role in roles.items() if role == "feature"), fitted["target"]):
        _check_moments(figures)


def _check_shard_of_windows(shard: Mapping[str, Any], splits: tuple[str, ...], window: int) -> None:
    checked_name(shard["path"], "the path of a shard")
    rows = whole(shard["rows"], "rows", least=0)
    if not all(isinstance(ticker, str) for ticker in shard["tickers"]):
        raise ValueError("tickers are names")
    for segment in shard["segments"]:
        first, last = (whole(row, "the rows of a segment", least=0) for row in segment["rows"])
        if not first <= last <= rows:
            raise ValueError(f"a segment of rows {first} to {last} is outside a shard of {rows}")
        for split in splits:
            begin, end = (whole(row, "the samples of a segment", least=0) for row in segment["samples"][split])
            if end > begin and not first + window - 1 <= begin < end <= last:
                raise ValueError(f"samples {begin} to {end} are outside the rows {first} to {last} of their segment")
