"""Rows of a table as a node reads them: as they were stored, verified, and within memory."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.kinds import build_table, table
from trainer.data.manifest import DatasetError
from trainer.data.row_data import RowData
from trainer.data.shards import DataShardManager
from trainer.model.rows import RowEncoder
from trainer.spec import row_spec_of


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(build_table(tmp_path_factory.mktemp("rows")).uri)


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy"))


def edited(folder: Path, change: Any) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def rewrite(folder: Path, column: str, values: Any) -> None:
    """Another shard, with a manifest that is right about its sha256."""
    manifest = json.loads((folder / "manifest.json").read_text())
    shard = manifest["shards"][0]
    rows = pq.read_table(folder / shard["path"])
    place = rows.schema.get_field_index(column)
    pq.write_table(rows.set_column(place, column, pa.array(values(rows[column].to_numpy()))), folder / shard["path"])
    digest = hashlib.sha256((folder / shard["path"]).read_bytes()).hexdigest()
    edited(folder, lambda manifest: manifest["shards"][0].update(sha256=digest))


def test_rows_and_targets_are_those_of_the_parquet_files(built: Path, cache: Path) -> None:
    data = RowData(str(built), cache)
    for split in ("train", "valid", "test"):
        found = [pq.read_table(built / s["path"]) for s in data.manifest["shards"] if s["split"] == split]
        stored = pa.concat_tables(found)
        positions = np.random.default_rng(0).permutation(data.count(split))
        rows, target = data.samples(split, positions)
        assert data.count(split) == len(stored)
        for place, name in enumerate(data.spec.features):
            assert np.array_equal(rows[:, place].numpy(), stored[name].to_numpy()[positions].astype(np.float32))
        assert target.dtype == torch.int64
        assert np.array_equal(target.numpy(), stored["bought"].to_numpy()[positions])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(kind="columns"), r"kind = 'columns': known are windows, rows"),
        (lambda m: m["shards"][0].update(rows=3), r"samples do not match the rows of the shards"),
        (lambda m: m["shards"][0].update(path="../x.parquet"), r"not a relative path"),
        (lambda m: m["shards"].reverse(), r"in the order of their splits"),
        (lambda m: m.update(classes=["no"]), r"task = 'binary' with 1 classes"),
        (lambda m: m["columns"][0].update(role="target"), r"one target, and features"),
        (lambda m: m["normalisation"]["features"]["x"].update(std=0), r"every std a number above zero"),
        (lambda m: m["columns"][2].update(values=[]), r"a category needs values"),
        (lambda m: m.pop("task"), r"task"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(copy: Path, cache: Path, change: Any, message: str) -> None:
    edited(copy, change)
    with pytest.raises(DatasetError, match=message):
        RowData(str(copy), cache)


def test_a_dataset_of_another_kind_is_refused(copy: Path, dataset: Path, cache: Path) -> None:
    with pytest.raises(DatasetError, match=r"is a dataset of rows, but windows are needed here"):
        DataShardManager(str(copy), cache)
    with pytest.raises(DatasetError, match=r"is a dataset of windows, but rows are needed here"):
        RowData(str(dataset), cache)


def test_a_damaged_or_missing_shard_is_refused_and_leaves_nothing(copy: Path, tmp_path: Path) -> None:
    shard = copy / "data" / "train-00000.parquet"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DatasetError, match=r"train-00000.parquet has sha256 .* damaged or was changed"):
        RowData(str(copy), tmp_path / "cache")
    shard.unlink()
    with pytest.raises(DatasetError, match=r"train-00000.parquet is missing"):
        RowData(str(copy), tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("x", lambda old: np.where(np.arange(len(old)) == 7, np.nan, old)),
        ("x", lambda old: np.full(len(old), np.inf)),
        ("x", lambda old: ["text"] * len(old)),
        ("colour", lambda old: old + 3),
        ("colour", lambda old: old - 0.5),
        ("bought", lambda old: old + 1),
        ("bought", lambda old: old * 0.5),
    ],
)
def test_values_that_the_manifest_does_not_have_are_refused(
    copy: Path, tmp_path: Path, column: str, values: Any
) -> None:
    rewrite(copy, column, values)
    with pytest.raises(DatasetError, match=rf"has values in '{column}' that its manifest does not have"):
        RowData(str(copy), tmp_path / "cache")


def test_rows_are_encoded_as_the_rule_says(tmp_path: Path) -> None:
    frame = table()
    frame.loc[::7, "x"] = None
    data = RowData(build_table(tmp_path, frame=frame, missing="mean").uri, tmp_path / "cache")
    spec = row_spec_of(data.manifest)
    rows, _ = data.samples("train", np.arange(data.count("train")))
    encoded = RowEncoder(spec)(rows)
    assert encoded.shape == (len(rows), spec.inputs)
    assert spec.inputs == 2 + 1 + 3
    gone = rows[:, 0].isnan()
    assert 100 < gone.sum() < 200
    assert (encoded[gone][:, 0] == 0).all(), "a missing number counts as the mean"
    assert torch.equal(encoded[:, 2], gone.float()), "and an input says so"
    assert encoded[~gone][:, 0].mean().abs() < 1e-5
    assert encoded[:, 1].std(correction=0) == pytest.approx(1, abs=1e-4)
    assert torch.equal(encoded[:, 3:].argmax(1) + 1, rows[:, 2].long())
    assert (encoded[:, 3:].sum(1) == 1).all()
    unknown = rows[:1].clone()
    unknown[0, 2] = 0
    assert (RowEncoder(spec)(unknown)[:, 3:] == 0).all()


def test_rows_are_given_back_as_they_were(tmp_path: Path) -> None:
    frame = table()[["x", "colour", "value"]].assign(seconds=1_700_000_000 + np.arange(1200))
    data = RowData(build_table(tmp_path, "value", frame=frame).uri, tmp_path / "cache")
    every = np.arange(data.count("train"))
    rows, (_, target) = data.original("train", every), data.samples("train", every)
    given = frame.set_index("seconds").loc[rows[:, 2].round().astype(int)]
    assert rows[:, 0] == pytest.approx(given["x"], abs=1e-6)
    assert rows[:, 1].tolist() == [["blue", "green", "red"].index(colour) + 1 for colour in given["colour"]]
    assert target.dtype == torch.float64
    assert target.tolist() == given["value"].tolist()


def test_a_dataset_of_an_older_version_is_refused_with_the_remedy(tmp_path: Path) -> None:
    made = Path(build_table(tmp_path, "value").uri)
    edited(made, lambda m: m.pop("inputs"))
    with pytest.raises(DatasetError, match="an older version built it: build the dataset again"):
        RowData(str(made), tmp_path / "cache")
    edited(made, lambda m: m.update(schema_version=1))
    with pytest.raises(DatasetError, match=r"schema version 1, this trainer reads 2.*build the dataset again"):
        RowData(str(made), tmp_path / "cache")
