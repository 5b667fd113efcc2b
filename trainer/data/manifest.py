"""The manifest of a dataset, checked before anything is made of it: names become paths, figures become addresses.

A user who can write a dataset's folder can write its manifest, and its digests with it. So no entry may lead out of a
folder, past the end of an array, or to an invalid number.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.documents.places import PlaceError, checked_id, checked_name
from trainer.documents.reader import parse_document
from trainer.documents.schemas import many, mapping, obj, record, text, whole
from trainer.errors import DamagedError
from trainer.spec import (
    BINARY,
    DATE_CATEGORIES,
    DATE_NUMBERS,
    KINDS,
    LANGUAGE_MODEL,
    MULTICLASS,
    RAW_TYPES,
    REGRESSION,
    ROWS,
    WINDOWS,
    DataSpec,
    RowSpec,
    row_spec_of,
    spec_of,
)
from trainer.storage.base import Storage

SCHEMA_VERSION = 1
STANDARDISED = 2
"""The version of tables whose numbers are stored in deviations from the mean; those of version 1 are as they were."""
_TOLD = record(
    dataset_id=text,
    created_at=text,
    samples=mapping(whole()),
    excluded=mapping(text),
    masks=many(obj),
    source=record(sha256=text, last_date=text, first_date=text, title=text),
)
"""The entries that other programs than the trainer read."""
SPLITS = ("train", "valid", "test")
ARRAYS = ("features", "target", "ticker", "date")
"""Arrays that every dataset of windows has; other columns are called as they are."""
MOST_CLASSES = 10_000
_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_LONGEST_WINDOW = 100_000
_LONGEST_NAME = 200
MOST_BYTES = 256 << 20
"""The largest manifest, in bytes: some hundred bytes for each ticker."""


class DatasetError(ValueError):
    """An error for a dataset that cannot be used. The message names the folder, what is wrong with it, and the
    remedy."""


class NoDatasetError(DatasetError):
    """An error for a folder without a dataset."""


def read_dataset_manifest(storage: Storage, expected_id: str | None = None) -> dict[str, Any]:
    """Return the checked manifest of the dataset in this folder. Raise `DatasetError` if none can be used, or if it is
    of another dataset than expected."""
    return checked_manifest(load_manifest(storage), storage, expected_id)


def checked_manifest(manifest: dict[str, Any], storage: Storage, expected_id: str | None = None) -> dict[str, Any]:
    """Return a loaded manifest after the checks of `read_dataset_manifest`, which raise `DatasetError`."""
    if "dataset_id" not in manifest:
        raise DatasetError(f"{storage.uri}/manifest.json does not describe a dataset: rebuild it")
    known = SCHEMA_VERSION if manifest.get("kind", WINDOWS) == WINDOWS else STANDARDISED
    if (found := manifest.get("schema_version")) != known:
        raise DatasetError(
            f"{storage.uri}: schema version {found}, this trainer reads {known}: another version built it; build the "
            "dataset again (dtrain data)"
        )
    check_manifest(manifest, storage.uri)
    if expected_id is not None and manifest["dataset_id"] != expected_id:
        raise DatasetError(
            f"dataset.dataset_id = {expected_id!r}, but {storage.uri} holds {manifest['dataset_id']!r}: "
            "point dataset.uri to the right folder"
        )
    return manifest


def load_manifest(storage: Storage) -> dict[str, Any]:
    """Return the unchecked manifest in this folder, see `parse_manifest`. Raise `NoDatasetError` if there is none."""
    return parse_manifest(manifest_bytes(storage), storage)


def manifest_bytes(storage: Storage) -> bytes:
    """Return the bytes of the manifest in this folder. Raise `NoDatasetError` if there is none, and `DatasetError` if
    it is too large or no regular file, such as a pipe. A link counts as its target."""
    where = f"{storage.uri}/manifest.json"
    try:
        if storage.is_local and not stat.S_ISREG(os.stat(storage.path("manifest.json")).st_mode):
            raise DatasetError(f"{where} is not a regular file: rebuild the dataset")
        if (size := storage.size("manifest.json")) > MOST_BYTES:
            raise DatasetError(f"{where} has {size:,} bytes, and a manifest has at most {MOST_BYTES:,}: rebuild it")
        return storage.read("manifest.json")
    except FileNotFoundError as error:
        raise NoDatasetError(
            f"dataset.uri = {storage.uri!r} holds no manifest.json: it is not a dataset, or building it was "
            "interrupted; build it, or point dataset.uri to the right folder"
        ) from error


def parse_manifest(data: bytes, storage: Storage) -> dict[str, Any]:
    """Return the manifest in these bytes; a missing key in it raises `DamagedError`, which names the file. Raise
    `DatasetError` if they are no manifest."""
    where = f"{storage.uri}/manifest.json"
    try:
        manifest = parse_document(data, where, None)
    except DamagedError as error:
        raise DatasetError(f"{where} is not valid JSON ({error.what}): rebuild the dataset") from error
    if not isinstance(manifest, dict):
        raise DatasetError(f"{where} does not describe a dataset: rebuild it")
    if wrong := _TOLD(manifest):
        raise DatasetError(f"{where} does not describe a dataset (it is {wrong}): rebuild it")
    return manifest


def check_manifest(manifest: dict[str, Any], uri: str) -> None:
    """Raise `DatasetError` if a manifest has a forbidden name, or its figures do not fit together."""
    try:
        check = check_rows if kind_of(manifest) == ROWS else check_windows
    except ValueError as error:
        raise DatasetError(f"{uri}/manifest.json: {error}") from None
    try:
        checked_id(manifest["dataset_id"], "dataset_id")
        check(manifest)
    except PlaceError as error:
        raise DatasetError(f"{uri}/manifest.json: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = error.what if isinstance(error, DamagedError) else str(error)
        raise DatasetError(f"{uri}/manifest.json does not describe a dataset ({reason}): rebuild it") from error


def content_digest(manifest: dict[str, Any]) -> str:
    """Return the sha256 of what the arrays of a dataset of windows depend on: the digests, order and rows of its
    shards, its columns."""
    shards = [[shard.get("sha256"), shard["rows"], shard["tickers"]] for shard in manifest["shards"]]
    columns = [[column["name"], column["role"]] for column in manifest["columns"]]
    return hashlib.sha256(json.dumps([shards, columns]).encode()).hexdigest()


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
    window = _whole(manifest["window"], "window", least=1, most=_LONGEST_WINDOW)
    _whole(manifest["horizon"], "horizon", least=0, most=_LONGEST_WINDOW)
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
    _check_inputs(manifest)
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


def _whole(value: Any, what: str, least: int, most: int = 1 << 40) -> int:
    """Return the value if it is a whole number of this range. Raise ValueError, which begins with ``what``."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{what} = {str(value)[:40]}, which is not a whole number from {least} to {most}")
    return value


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME and value.isprintable()


def _check_moments(figures: Mapping[str, Any]) -> None:
    if not math.isfinite(figures["mean"]) or not math.isfinite(figures["std"]) or figures["std"] <= 0:
        raise ValueError("normalisation: every mean must be a number, every std a number above zero")


def _check_inputs(manifest: Mapping[str, Any]) -> None:
    """Raise ValueError where the columns of the table do not fit those that are stored."""
    if "inputs" not in manifest:
        raise ValueError("an older version built it: build the dataset again (dtrain data)")
    types = {column["name"]: column["type"] for column in manifest["inputs"]}
    for column in manifest["inputs"]:
        fits = _is_name(column["name"]) and column["type"] in RAW_TYPES and isinstance(column["missing"], bool)
        if not fits or set(column) != {"name", "type", "missing"}:
            raise ValueError(
                f"inputs: {str(column)[:80]} is no column with a name, a type and whether it may be missing"
            )
    features = [column for column in manifest["columns"] if column["role"] == "feature"]
    if len(types) < len(manifest["inputs"]) or {column.get("of", column["name"]) for column in features} != set(types):
        raise ValueError("inputs must be distinct, and those of which the stored columns are made")
    for column in features:
        kind, part = types[column.get("of", column["name"])], column.get("part", "")
        is_category = kind == "string" or part in DATE_CATEGORIES
        if part not in ("", *DATE_NUMBERS, *DATE_CATEGORIES) or (part and kind != "datetime"):
            raise ValueError(f"{column['name']!r} is the part {str(part)[:40]!r} of a {kind}, which has none such")
        if is_category != (column["type"] == "category"):
            raise ValueError(f"{column['name']!r} is stored as a {column['type']}, and is made of a {kind}")


def _check_row_shards(manifest: Mapping[str, Any]) -> None:
    order = [SPLITS.index(shard["split"]) for shard in manifest["shards"]]
    if order != sorted(order):
        raise ValueError("shards must be in the order of their splits: train, valid, test")
    for shard in manifest["shards"]:
        checked_name(shard["path"], "the path of a shard")
        _whole(shard["rows"], "rows", least=0)
    for split, shards in shards_by_split(manifest).items():
        if manifest["samples"][split] != sum(shard["rows"] for shard in shards):
            raise ValueError("samples do not match the rows of the shards")


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
    rows = _whole(shard["rows"], "rows", least=0)
    if not all(isinstance(ticker, str) for ticker in shard["tickers"]):
        raise ValueError("tickers are names")
    for segment in shard["segments"]:
        first, last = (_whole(row, "the rows of a segment", least=0) for row in segment["rows"])
        if not first <= last <= rows:
            raise ValueError(f"a segment of rows {first} to {last} is outside a shard of {rows}")
        for split in splits:
            begin, end = (_whole(row, "the samples of a segment", least=0) for row in segment["samples"][split])
            if end > begin and not first + window - 1 <= begin < end <= last:
                raise ValueError(f"samples {begin} to {end} are outside the rows {first} to {last} of their segment")
