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
    MULTICLASS,
    REGRESSION,
    ROWS,
    TOKENS,
    WINDOWS,
    DataSpec,
    RowSpec,
    TokenSpec,
    row_spec_of,
    spec_of,
    token_spec_of,
)

SPLITS = ("train", "valid", "test")
ARRAYS = ("features", "target", "ticker", "date")
"""Arrays that every dataset of windows has; other columns are called as they are."""
MOST_CLASSES = 10_000
MOST_IDS = 1 << 24
"""The largest vocabulary. Ids are stored in 16 bits up to 65,536, and in 32 above."""
FEW_DOCUMENTS = 20
"""With fewer documents, each is divided by itself: its beginning is for training, its end for the test."""
_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_LONGEST_WINDOW = 100_000
_LONGEST_CONTEXT = 1 << 20
_LONGEST_NAME = 200


def kind_of(manifest: Mapping[str, Any]) -> str:
    """Return the kind of a dataset: ``windows`` where its manifest, of an older version, does not say. Raise ValueError
    for one that this version does not know."""
    kind = manifest.get("kind", WINDOWS)
    if kind not in KINDS:
        raise ValueError(f"kind = {str(kind)[:40]!r}: known are {', '.join(KINDS)}")
    return kind


def describe(manifest: Mapping[str, Any]) -> DataSpec | RowSpec | TokenSpec:
    """Return the description that a manifest gives to models, by its kind. Pure."""
    kind = kind_of(manifest)
    if kind == ROWS:
        return row_spec_of(manifest)
    return token_spec_of(manifest) if kind == TOKENS else spec_of(manifest)


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
        raise ValueError(f"columns must be distinct strings of at most {_LONGEST_NAME} characters")
    if roles.count("target") != 1 or roles.count("feature") != len(roles) - 1 or len(roles) < 2:
        raise ValueError("columns must have one target, and features")
    fits = {REGRESSION: len(classes) == 0, BINARY: len(classes) == 2, MULTICLASS: 2 < len(classes) <= MOST_CLASSES}
    if not fits.get(task, False) or not all(_is_name(name) for name in classes) or len(set(classes)) < len(classes):
        raise ValueError(f"task = {str(task)[:40]!r} with {len(classes)} classes, which must be distinct strings")
    for column in columns:
        if column["role"] != "feature":
            continue
        if column["type"] not in ("number", "category"):
            raise ValueError(f"the type of {column['name']!r} is neither number nor category")
        values = column.get("values", [])
        if (column["type"] == "category") != bool(values) or not all(isinstance(value, str) for value in values):
            raise ValueError(
                f"{column['name']!r}: a category needs values, which must be strings, and a number must have none"
            )
        if not isinstance(column.get("missing", False), bool):
            raise ValueError(f"{column['name']!r}: missing is neither true nor false")
        _check_moments(manifest["normalisation"]["features"][column["name"]])
    _check_moments(manifest["normalisation"]["target"])
    _check_parts(manifest, "rows")


def check_tokens(manifest: Mapping[str, Any]) -> None:
    """Raise ValueError where the figures of a stream of tokens do not fit together."""
    context = whole(manifest["context"], "context", least=1, most=_LONGEST_CONTEXT)
    whole(manifest["vocabulary"], "vocabulary", least=2, most=MOST_IDS)
    rows = _check_parts(manifest, "tokens")
    for split in SPLITS:
        if manifest["samples"][split] != windows_in(rows[split], context):
            raise ValueError(f"samples.{split} = {manifest['samples'][split]} does not match the number of tokens")
    for split in SPLITS:
        whole(manifest["units"][split], f"units.{split}", least=0)


def windows_in(tokens: int, context: int) -> int:
    """Return the number of samples in a stream of tokens: windows of ``context`` tokens, each with the one after it."""
    return max(0, tokens - 1) // context


def id_bytes(vocabulary: int) -> int:
    """Return the bytes of one stored token: 2 or 4."""
    return 2 if vocabulary <= 1 << 16 else 4


def shards_by_split(manifest: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the shards of each split, in order. Of rows and tokens each shard belongs to one."""
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
        raise ValueError(f"{what} = {str(value)[:40]}, which is not a whole number from {least} to {most}")
    return value


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME and value.isprintable()


def _check_moments(figures: Mapping[str, Any]) -> None:
    if not math.isfinite(figures["mean"]) or not math.isfinite(figures["std"]) or figures["std"] <= 0:
        raise ValueError("normalisation: every mean must be a number, every std a number above zero")


def _check_parts(manifest: Mapping[str, Any], what: str) -> dict[str, int]:
    """Return the number of rows or tokens of each split, after the checks of the shards."""
    order = [SPLITS.index(shard["split"]) for shard in manifest["shards"]]
    if order != sorted(order):
        raise ValueError("shards must be in the order of their splits: train, valid, test")
    for shard in manifest["shards"]:
        checked_name(shard["path"], "the path of a shard")
        whole(shard["rows"], what, least=0)
    counts = {
        split: sum(shard["rows"] for shard in shards) for split, shards in shards_by_split(manifest).items()
    }  # fmt: skip
    if what == "rows" and any(manifest["samples"][split] != counts[split] for split in SPLITS):
        raise ValueError("samples do not match the rows of the shards")
    return counts


def _check_columns(manifest: Mapping[str, Any]) -> None:
    columns: Sequence[Mapping[str, Any]] = manifest["columns"]
    names = [column["name"] for column in columns]
    if len(set(names)) < len(names) or not all(_COLUMN.fullmatch(name) for name in names):
        raise ValueError("columns must be distinct names of letters, digits and underscores")
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
