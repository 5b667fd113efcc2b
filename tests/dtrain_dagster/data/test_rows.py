"""Tables become datasets of rows, or are refused with the column and the remedy; nothing half-written is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.rows import RowParams, build_rows, hashed_shares, numbered_shares, splits_of
from tests.kinds import WORDS, build_table, table


def stored(made: Any) -> dict[str, pd.DataFrame]:
    """The rows of each split."""
    shards = made.manifest["shards"]
    return {
        split: pd.concat([pq.read_table(Path(made.uri, s["path"])).to_pandas() for s in shards if s["split"] == split])
        for split in ("train", "valid", "test")
    }


@pytest.mark.parametrize(
    ("target", "task", "classes"),
    [("value", "regression", []), ("bought", "binary", ["no", "yes"]), ("level", "multiclass", ["0", "1", "2"])],
)
def test_every_row_is_in_one_split_as_it_was(tmp_path: Path, target: str, task: str, classes: list[str]) -> None:
    made = build_table(tmp_path, target, shard_rows=500)
    found = stored(made)
    assert (made.manifest["task"], made.manifest["classes"]) == (task, classes)
    assert {split: len(rows) for split, rows in found.items()} == made.manifest["samples"]
    assert sum(made.manifest["samples"].values()) == 1200
    assert len([shard for shard in made.manifest["shards"] if shard["split"] == "train"]) == 2, "of about 500 rows"
    given, rows = table(), pd.concat(found.values())
    both = rows.merge(given.assign(x32=given["x"].astype(np.float32)), left_on="x", right_on="x32", suffixes=("", "_"))
    assert len(both) == 1200
    assert [sorted(WORDS)[code - 1] for code in both["colour"]] == both["colour_"].tolist()
    if classes:
        assert [classes[code] for code in both[target]] == both[f"{target}_"].astype(str).tolist()
    else:
        assert np.array_equal(both[target], both[f"{target}_"].astype(np.float32))


def test_normalisation_is_that_of_the_training_rows(tmp_path: Path) -> None:
    made = build_table(tmp_path, "value")
    train, fitted = stored(made)["train"], made.manifest["normalisation"]
    for name, figures in [("x", fitted["features"]["x"]), ("value", fitted["target"])]:
        assert figures["mean"] == pytest.approx(train[name].mean(), rel=1e-5)
        assert figures["std"] == pytest.approx(train[name].std(ddof=0), rel=1e-5)


def test_the_same_is_built_once_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    first = build_table(tmp_path)
    again = build_table(tmp_path)
    assert (first.built, again.built, again.uri) == (True, False, first.uri)
    assert build_table(tmp_path, seed=1).dataset_id != first.dataset_id
    shard = Path(first.uri, first.manifest["shards"][0]["path"])
    shard.write_bytes(shard.read_bytes()[:-9] + b"123456789")
    with pytest.raises(DataError, match=r"train-00000.parquet is not what its manifest says; delete"):
        build_table(tmp_path)


def odd(name: str, values: Any, rows: int = 1200) -> pd.DataFrame:
    frame = table(rows)
    frame[name] = values
    return frame


def with_hole(name: str) -> pd.DataFrame:
    frame = table()
    frame.loc[700, name] = None
    return frame


@pytest.mark.parametrize(
    ("frame", "params", "message"),
    [
        (with_hole("x"), {}, r"column 'x' lacks 1 numbers .*--drop x.*--missing mean"),
        (with_hole("bought"), {}, r"target 'bought' is missing.* in row 700"),
        (odd("y", [0.0] * 900 + [np.inf] + [0.0] * 299), {}, r"column 'y' has inf in row 900"),
        (odd("y", [0.0] * 900 + [1e300] + [0.0] * 299), {}, r"column 'y' has 1e\+300 in row 900"),
        (odd("day", pd.Timestamp("2020-01-01")), {}, r"column 'day' has the type timestamp.*--drop day"),
        (
            table(1500).assign(name=[f"n{number}" for number in range(1500)]),
            {},
            r"column 'name' has more than 1000 values",
        ),
        (table(), {"task": "regression"}, r"target 'bought' is text, and a regression needs numbers"),
        (table(), {"task": "multiclass"}, r"target 'bought' has 2 values .* multiclass needs 3"),
        (table(), {"split_by": "town"}, r"--split-by town: the table has no such column"),
        (table(), {"valid_fraction": 0.6, "test_fraction": 0.5}, r"their sum below 1"),
        (table()[:3], {}, r"(valid|test) split (has no rows|alone)|training split"),
        (odd("bought", ["only"] * 1200), {}, r"target 'bought' has 1 values"),
        (table()[["colour", "bought"]].assign(colour="red")[["bought"]], {}, r"no column besides the target"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    tmp_path: Path, frame: pd.DataFrame, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        build_table(tmp_path, frame=frame, **params)
    assert not list(tmp_path.glob("datasets/*")), "nothing half-written"


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 or not")
    with pytest.raises(DataError, match=r"a.parquet is no Parquet file that can be read"):
        build_rows(str(tmp_path / "a.parquet"), str(tmp_path), RowParams(target="y"))
    with pytest.raises(DataError, match="there is no Parquet file"):
        build_rows(str(tmp_path / "b.parquet"), str(tmp_path), RowParams(target="y"))


def test_missing_numbers_and_constant_columns(tmp_path: Path) -> None:
    frame = with_hole("x")
    frame["same"] = 3
    made = build_table(tmp_path, frame=frame, missing="mean")
    columns = {column["name"]: column for column in made.manifest["columns"]}
    assert columns["x"]["missing"]
    assert not columns["y"]["missing"]
    assert made.manifest["excluded"] == {"same": "does not vary over the training split"}
    assert sum(rows["x"].isna().sum() for rows in stored(made).values()) == 1


def test_rows_of_a_group_stay_together_and_named_splits_are_kept(tmp_path: Path) -> None:
    frame = table()
    frame["customer"] = np.arange(1200) // 4
    frame["number"] = np.arange(1200.0)
    found = stored(build_table(tmp_path, frame=frame, split_by="customer"))
    groups = [set((rows["number"] // 4).tolist()) for rows in found.values()]
    assert "customer" not in found["train"]
    assert len(set.union(*groups)) == sum(map(len, groups)), "none in two splits"
    frame["customer"] = ["train"] * 1000 + ["valid"] * 150 + ["test"] * 50
    assert build_table(tmp_path, frame=frame, split_by="customer").manifest["samples"] == {
        "train": 1000, "valid": 150, "test": 50
    }  # fmt: skip


def test_rows_are_divided_by_the_fractions() -> None:
    for shares in (numbered_shares(0, 50_000, 0), hashed_shares([str(number) for number in range(50_000)], 0)):
        assert ((shares >= 0) & (shares < 1)).all()
        counts = np.bincount(splits_of(shares, 0.1, 0.2)) / 50_000
        assert counts == pytest.approx([0.7, 0.1, 0.2], abs=0.01)
    assert np.array_equal(numbered_shares(0, 100, 3)[40:], numbered_shares(40, 60, 3)), "whatever the batches"
    assert not np.array_equal(numbered_shares(0, 100, 3), numbered_shares(0, 100, 4))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    """What is held beyond the imports is some batches, for a table ten times as large as well."""
    script = """
import json, re, sys
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from pathlib import Path
from dtrain_dagster.data.rows import RowParams, build_rows
folder, groups = Path(sys.argv[1]), int(sys.argv[2])
random = np.random.default_rng(0)
def group():
    columns = {f"c{n}": random.standard_normal(50_000).astype(np.float32) for n in range(16)}
    return pa.table(columns | {"y": random.standard_normal(50_000)})
with pq.ParquetWriter(folder / "t.parquet", group().schema) as writer:
    for _ in range(groups):
        writer.write_table(group())
made = build_rows(str(folder / "t.parquet"), str(folder), RowParams(target="y"))
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
print(json.dumps([peak, sum(made.manifest["samples"].values())]))
"""
    peaks = []
    for groups in (4, 40):
        folder = tmp_path / str(groups)
        folder.mkdir()
        done = subprocess.run([sys.executable, "-c", script, str(folder), str(groups)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peak, rows = json.loads(done.stdout)
        assert rows == groups * 50_000
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 60 << 20, "of 122 MB more of numbers"
