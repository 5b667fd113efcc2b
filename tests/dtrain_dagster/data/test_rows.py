"""Tables become datasets of rows, or are refused with the column and the remedy; nothing half-written is left."""

from __future__ import annotations

import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.row_splits import hashed_shares, numbered_shares, splits_of
from dtrain_dagster.data.rows import RowParams, build_rows
from dtrain_dagster.data.table_columns import NumberColumn
from tests.kinds import WORDS, build_table, original_rows, stored_rows, table


@pytest.mark.parametrize(
    ("target", "task", "classes"),
    [("value", "regression", []), ("bought", "binary", ["no", "yes"]), ("level", "multiclass", ["0", "1", "2"])],
)
def test_every_row_is_in_one_split_as_it_was(tmp_path: Path, target: str, task: str, classes: list[str]) -> None:
    made = build_table(tmp_path, target, shard_rows=500)
    found = original_rows(made)
    assert (made.manifest()["task"], made.manifest()["classes"]) == (task, classes)
    assert {split: len(rows) for split, rows in found.items()} == made.manifest()["samples"]
    assert sum(made.manifest()["samples"].values()) == 1200
    assert len([shard for shard in made.manifest()["shards"] if shard["split"] == "train"]) == 2, "of about 500 rows"
    given, rows = table().sort_values("x"), pd.concat(found.values()).sort_values("x")
    assert rows["x"].to_numpy() == pytest.approx(given["x"].to_numpy(), abs=1e-6)
    assert [sorted(WORDS)[int(code) - 1] for code in rows["colour"]] == given["colour"].tolist()
    if classes:
        assert [classes[code] for code in rows[target]] == given[target].astype(str).tolist()
    else:
        assert np.array_equal(rows[target], given[target]), "with all its digits"


def test_rows_are_standardised_by_the_training_rows(tmp_path: Path) -> None:
    made = build_table(tmp_path, "value")
    train, target = stored_rows(made)["train"], made.manifest()["normalisation"]["target"]
    for name in ("x", "y"):
        assert train[name].mean() == pytest.approx(0, abs=1e-6)
        assert train[name].std(ddof=0) == pytest.approx(1, rel=1e-6)
    assert target["mean"] == pytest.approx(train["value"].mean(), rel=1e-12)
    assert target["std"] == pytest.approx(train["value"].std(ddof=0), rel=1e-12)


STEPS = np.random.default_rng(0).permutation(1200)
KEPT: dict[str, Any] = {
    "seconds since 1970": 1_700_000_000 + STEPS,
    "milliseconds since 1970": 1_700_000_000_000 + STEPS,
    "nanoseconds since 1970, by the second": 1_700_000_000_000_000_000 + STEPS * 1_000_000_000,
    "a small part of a large number": 1e12 + STEPS,
    "next to nothing": 1e-30 * (5 + STEPS),
    "close to the largest": 1e37 * (STEPS / 1200),
    "decimals": [Decimal(int(step)).scaleb(-2) + 10**9 for step in STEPS],
    "true or false": STEPS % 2 == 0,
    "dates": pd.Timestamp("2023-01-01") + pd.to_timedelta(STEPS, unit="D"),
    "times with a zone": (pd.Timestamp("2023-01-01", tz="Asia/Tokyo") + pd.to_timedelta(STEPS, unit="s")),
    "unsigned": np.uint64(2**63) + STEPS.astype(np.uint64) * np.uint64(2**20),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_number_keeps_what_tells_it_from_others(tmp_path: Path, case: str) -> None:
    """Whatever its size: the same as the steps alone, which are standardised without a loss."""
    frame = table()[["x", "value"]].assign(n=KEPT[case], step=STEPS if case != "true or false" else STEPS % 2 == 0)
    rows = pd.concat(stored_rows(build_table(tmp_path, "value", frame)).values())
    assert rows["n"].to_numpy() == pytest.approx(rows["step"].to_numpy(), abs=2e-6)
    assert rows["n"].nunique() == rows["step"].nunique()


LOST: dict[str, tuple[Any, str]] = {
    "nanoseconds": (1_700_000_000_000_000_000 + STEPS, r"has 1,200 different numbers in 1,200 .* of which [1-9] are"),
    "an outlier": (np.where(STEPS == 7, 1e15, STEPS), r"has 1,200 different numbers .* \d+ are left .* cut off out"),
    "two clouds": (np.where(STEPS < 600, 1e12, 0) + STEPS, r"has 1,200 different numbers"),
    "too little": (5e-324 * STEPS, r"varies from 0.0 to .*, which is too little .* multiply it"),
    "too large": (np.where(STEPS == 7, -3e38, 1.0), r"has -3e\+38 in row \d+, counted from 0, which is too large"),
}  # fmt: skip


@pytest.mark.parametrize("case", LOST)
@pytest.mark.parametrize("role", ["column", "target"])
def test_numbers_that_would_become_the_same_are_refused(tmp_path: Path, case: str, role: str) -> None:
    values, message = LOST[case]
    frame = table()[["x", "y"]].assign(value=values) if role == "target" else table().assign(n=values)
    if (role, case) == ("target", "too large"):
        message = r"is missing, or too large, in row \d+"
    named = "target 'value'" if role == "target" else "column 'n'"
    with pytest.raises(DataError, match=f"the {named} {message}"):
        build_table(tmp_path, "value", frame, task="regression")


def test_a_column_of_one_number_is_left_out_whatever_its_rounding(tmp_path: Path) -> None:
    made = build_table(tmp_path, frame=table().assign(same=0.1, also=1e15 / 3))
    assert set(made.manifest()["excluded"]) == {"same", "also"}
    with pytest.raises(DataError, match="target 'value' does not vary"):
        build_table(tmp_path, "value", table().assign(value=0.1), task="regression")


def test_classes_are_told_apart_by_all_their_digits(tmp_path: Path) -> None:
    made = build_table(tmp_path, "level", table().assign(level=2**60 + STEPS % 3))
    assert made.manifest()["classes"] == [str(2**60 + step) for step in range(3)]


def test_the_same_is_built_once(tmp_path: Path) -> None:
    first, again = build_table(tmp_path), build_table(tmp_path)
    assert (first.built, again.built, again.uri) == (True, False, first.uri)
    assert build_table(tmp_path, seed=1).dataset_id != first.dataset_id


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
        (odd("day", pd.Timedelta("1D")), {}, r"column 'day' has the type duration.*--drop day"),
        (odd("value", pd.Timestamp("2020-01-01")), {"target": "value"}, r"^the target 'value' is a date"),
        (
            table(1500).assign(name=[f"n{number}" for number in range(1500)]),
            {},
            r"column 'name' has more than 1000 values",
        ),
        (table(), {"task": "regression"}, r"target 'bought' is text, and a regression needs numbers"),
        (table(), {"task": "multiclass"}, r"target 'bought' has 2 values .* multiclass needs 3"),
        (
            table().assign(bought=["yes", "no"] * 599 + ["maybe"] * 2, part=["train"] * 900 + ["valid", "test"] * 150),
            {"split_by": "part"},
            r"class 'maybe' only in the validation or test split",
        ),
        (table(), {"split_by": "town"}, r"--split-by town: the table has no such column"),
        (table(), {"valid_fraction": 0.6, "test_fraction": 0.5}, r"their sum below 1"),
        (table()[:0], {}, r"^the table has no rows$"),
        (table().replace({"bought": {"yes": "y" * 201}}), {}, r"target 'bought' has the class 'y+', which is longer"),
        (table()[:3], {}, r"(valid|test) split (has no rows|alone)|training split"),
        (odd("bought", ["only"] * 1200), {}, r"target 'bought' has 1 values"),
        (table()[["colour", "bought"]].assign(colour="red")[["bought"]], {}, r"no column besides the target"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    tmp_path: Path, frame: pd.DataFrame, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        build_table(tmp_path, **{"frame": frame, **params})
    assert not list(tmp_path.glob("datasets/*")), "nothing half-written"


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 or not")
    with pytest.raises(DataError, match=r"a.parquet is not a Parquet file that can be read"):
        build_rows(str(tmp_path / "a.parquet"), str(tmp_path), RowParams(target="y"))
    for absent in ("b.parquet", "nowhere"):
        with pytest.raises(DataError, match="there is no Parquet or CSV file"):
            build_rows(str(tmp_path / absent), str(tmp_path), RowParams(target="y"))
    (tmp_path / "c.xlsx").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"c.xlsx is not a Parquet file, and by its name not a CSV file either"):
        build_rows(str(tmp_path / "c.xlsx"), str(tmp_path), RowParams(target="y"))
    (tmp_path / "d.csv").write_text("")
    with pytest.raises(DataError, match=r"d.csv is empty"):
        build_rows(str(tmp_path / "d.csv"), str(tmp_path), RowParams(target="y"))


def test_missing_numbers_and_constant_columns(tmp_path: Path) -> None:
    frame = with_hole("x")
    frame["same"] = 3
    made = build_table(tmp_path, frame=frame, missing="mean")
    columns = {column["name"]: column for column in made.manifest()["columns"]}
    assert columns["x"]["missing"]
    assert not columns["y"]["missing"]
    assert made.manifest()["excluded"] == {"same": "does not vary over the training split"}
    assert sum(rows["x"].isna().sum() for rows in stored_rows(made).values()) == 1


def test_rows_of_a_group_stay_together_and_named_splits_are_kept(tmp_path: Path) -> None:
    frame = table()
    frame["customer"] = np.arange(1200) // 4
    frame["number"] = np.arange(1200.0)
    found = original_rows(build_table(tmp_path, frame=frame, split_by="customer"))
    groups = [set((rows["number"].round() // 4).tolist()) for rows in found.values()]
    assert "customer" not in found["train"]
    assert len(set.union(*groups)) == sum(map(len, groups)), "none in two splits"


@pytest.mark.parametrize(("one", "other"), [
    (lambda ids: ids, lambda ids: ids.astype(float)),
    (lambda ids: pd.to_datetime("2020-01-01") + pd.to_timedelta(ids, "D"),
     lambda ids: (pd.to_datetime("2020-01-01") + pd.to_timedelta(ids, "D")).date),
    (lambda ids: pd.to_datetime("2020-01-01") + pd.to_timedelta(ids, "h"),
     lambda ids: pd.to_datetime("2020-01-01", utc=True) + pd.to_timedelta(ids, "h")),
], ids=["whole and float", "time and day", "without a zone and UTC"])  # fmt: skip
def test_rows_of_a_group_stay_together_where_files_differ_in_its_type(tmp_path: Path, one: Any, other: Any) -> None:
    (tmp_path / "files").mkdir()
    ids = np.arange(600)
    for name, of in (("a", one), ("b", other)):
        frame = table()[:600].assign(customer=of(ids), number=ids.astype(float))
        frame.to_parquet(tmp_path / "files" / f"{name}.parquet")
    built = build_rows(str(tmp_path / "files"), str(tmp_path), RowParams(target="y", split_by="customer"))
    groups = [set(rows["number"].round().tolist()) for rows in original_rows(built).values()]
    assert len(set.union(*groups)) == sum(map(len, groups)) == 600, "none in two splits"


def test_numbers_that_are_one_in_double_precision_are_refused_and_not_left_out(tmp_path: Path) -> None:
    frame = table().assign(k=np.arange(1200) % 5 + 2**56)
    with pytest.raises(DataError, match="'k' has 5 different numbers, which are one in double precision"):
        build_table(tmp_path, frame=frame)


@pytest.mark.parametrize("names", [
    "train valid test", "TRAIN VALID TEST", "Train Val Test", "training validation testing", " train  dev  holdout ",
])  # fmt: skip
def test_splits_are_known_by_their_usual_names(tmp_path: Path, names: str) -> None:
    train, valid, test = re.findall(r" ?\w+ ?", names)
    frame = table().assign(part=[train] * 1000 + [valid] * 190 + [test] * 10)
    frame.loc[:3, "part"] = "train"  # in another writing
    manifest = build_table(tmp_path, frame=frame, split_by="part").manifest()
    assert manifest["samples"] == {"train": 1000, "valid": 190, "test": 10}
    assert manifest["notes"] == ["the test split has 10 rows: its figures are little more than chance"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"train": 1000, "TEST": 150, "other": 50},
            r"'train' \(1,000 rows\), 'TEST' \(150 rows\), 'other' \(50 rows\)",
        ),
        (
            {"train": 1100, "test": 100},
            r"valid split has no rows \(train 1,100, valid 0, test 100\): --split-by part names",
        ),
        ({"train": 1100, "val": 99, "test": 1}, r"test split has only 1 row \("),
        ({"A": 1100, "B": 100}, r"has no rows .* stay together, and there are only 2 values"),
        ({"train": 1000, "valid": 150, None: 50}, r"--split-by part: the column is empty in row 1150"),
    ],
)
def test_names_of_splits_that_are_mixed_or_missing_are_told(
    tmp_path: Path, parts: dict[Any, int], message: str
) -> None:  # fmt: skip
    frame = table().assign(part=[name for name, count in parts.items() for _ in range(count)])
    with pytest.raises(DataError, match=message):
        build_table(tmp_path, frame=frame, split_by="part")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_an_index_is_no_feature(tmp_path: Path, form: str) -> None:
    """Rows that are in the order of their targets would be told by it."""
    frame = table()[["x", "value"]].sort_values("value")
    unnamed, named = ("Unnamed: 0", "index") if form == "csv" else ("__index_level_0__", "customer")
    cases: list[tuple[pd.DataFrame, dict[str, bool], str]] = [
        (frame, {}, unnamed),
        (frame.set_axis(STEPS % 400 if form == "parquet" else STEPS).rename_axis(named), {}, named),
        (frame.reset_index(), {"index": False}, "index"),
        (frame.assign(id=STEPS), {"index": False}, "id"),
    ]
    for number, (given, more, left) in enumerate(cases):
        path = tmp_path / f"{number}.{form}"
        (given.to_csv if form == "csv" else given.to_parquet)(path, **more)
        made = build_rows(str(path), str(tmp_path), RowParams(target="value"))
        assert "x" in [column["name"] for column in made.manifest()["columns"]]
        assert left not in [column["name"] for column in made.manifest()["columns"]]
        assert left in made.manifest()["excluded"]


def test_rows_are_divided_by_the_fractions() -> None:
    for shares in (numbered_shares(0, 50_000, 0), hashed_shares([str(number) for number in range(50_000)], 0)):
        assert ((shares >= 0) & (shares < 1)).all()
        counts = np.bincount(splits_of(shares, 0.1, 0.2)) / 50_000
        assert counts == pytest.approx([0.7, 0.1, 0.2], abs=0.01)
    assert np.array_equal(numbered_shares(0, 100, 3)[40:], numbered_shares(40, 60, 3)), "whatever the batches"
    assert not np.array_equal(numbered_shares(0, 100, 3), numbered_shares(0, 100, 4))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    """What is held beyond the imports is some batches, for a table eight times as large as well."""
    script = """
import re, sys
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from pathlib import Path
from dtrain_dagster.data.rows import RowParams, build_rows
folder, random = Path(sys.argv[1]), np.random.default_rng(0)
numbers = random.standard_normal(60_000).astype(np.float32)
def group():
    columns = {f"c{n}": np.roll(numbers, random.integers(60_000)) + random.random() for n in range(16)}
    return pa.table(columns | {"y": numbers.astype(float)})
for groups in (2, 16):
    with pq.ParquetWriter(folder / f"{groups}.parquet", group().schema) as writer:
        for _ in range(groups):
            writer.write_table(group())
    made = build_rows(str(folder / f"{groups}.parquet"), str(folder), RowParams(target="y"))
    assert sum(made.samples.values()) == groups * 60_000
    print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    small, large = map(int, done.stdout.split())
    assert large - small < 35 << 20, "of 60 MB more of numbers"


def dated(rows: int = 400) -> pd.DataFrame:
    """Rows with a date by the hour, a number, and a target that follows from the day of the week."""
    random = np.random.default_rng(2)
    seen = pd.Timestamp("2019-11-20") + pd.to_timedelta(random.integers(0, 24 * 900, rows), unit="h")
    return pd.DataFrame({"seen": seen, "x": random.normal(size=rows), "y": seen.day_of_week + random.normal(size=rows)})


def test_a_date_is_kept_in_parts(tmp_path: Path) -> None:
    made = build_table(tmp_path, "y", dated())
    columns = {column["name"]: column for column in made.manifest()["columns"]}
    assert list(columns) == [
        "seen", "seen.year", "seen.day", "seen.month", "seen.weekday", "seen.hour", "x", "y",
    ]  # fmt: skip
    assert columns["seen.weekday"] == {
        "name": "seen.weekday", "role": "feature", "type": "category", "of": "seen", "part": "weekday",
        "values": list("1234567"),
    }  # fmt: skip
    assert made.manifest()["inputs"] == [
        {"name": "seen", "type": "datetime", "missing": False},
        {"name": "x", "type": "number", "missing": False},
    ]
    found = pd.concat(original_rows(made).values()).sort_values("x")
    given = dated().sort_values("x")["seen"].dt
    assert found["seen.weekday"].to_numpy() == pytest.approx(given.day_of_week.to_numpy() + 1)
    assert found["seen.year"].to_numpy() == pytest.approx(given.year.to_numpy(), abs=1e-3)
    assert found["seen.day"].to_numpy() == pytest.approx(given.day.to_numpy(), abs=1e-3)
    hours = [int(columns["seen.hour"]["values"][int(code) - 1]) for code in found["seen.hour"]]
    assert hours == given.hour.tolist()


def test_parts_that_say_nothing_more_are_left_out_without_a_word(tmp_path: Path) -> None:
    frame = dated().assign(seen=lambda rows: rows["seen"].dt.normalize(), since=pd.Timestamp("2020-05-05"))
    made = build_table(tmp_path, "y", frame)
    names = [column["name"] for column in made.manifest()["columns"]]
    assert "seen.month" in names
    assert "seen.hour" not in names, "each time is midnight"
    assert made.manifest()["excluded"] == {"since": "does not vary over the training split"}


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        (
            {"order_id": np.random.default_rng(3).permutation(400) + 10_000},
            "order_id has another value in nearly",
        ),
        ({"token": [f"t{row}" for row in range(400)]}, "token has another value in nearly every row, as an identifier"),
        ({"word": np.where(np.arange(400) % 3 > 1, "a", "b")}, "word says the target again in other words"),
        ({"hits": np.random.default_rng(3).integers(0, 300, 400)}, ""),
        ({"word": [f"w{row % 3}" for row in range(400)]}, ""),  # two of them go with one value of the target
        ({"cents": np.random.default_rng(3).normal(size=400)}, ""),
        ({"word": np.where(np.arange(400) % 2, "a", "b")}, ""),
    ],
)
def test_what_should_be_no_feature_is_told(tmp_path: Path, changes: dict[str, Any], note: str) -> None:
    frame = dated()[["x"]].assign(bought=np.where(np.arange(400) % 3 > 1, "yes", "no"), **changes)
    notes = "\n".join(build_table(tmp_path, "bought", frame).manifest()["notes"])
    if note:
        assert note.replace("target again", "target bought") in notes
    else:
        assert not notes


@pytest.mark.parametrize(
    ("frame", "params", "message"),
    [
        (dated().assign(copy=lambda rows: rows["y"]), {}, "the column 'copy' is the target 'y' in each row"),
        (dated().assign(**{"seen.day": 1.0}), {}, "'seen.day' has the name of a part of the date 'seen': rename it"),
        (dated().assign(token=[f"t{row}" for row in range(400)], big=1), {"drop": ("y",)}, "--drop y: that is the"),
        (
            pd.DataFrame({"y": np.arange(3000) % 7 + 0.5, "key": [f"k{row}" for row in range(3000)]}),
            {},
            "'key' has more than 1000 values, and another in nearly every row, as an identifier",
        ),
    ],
)
def test_a_table_that_would_teach_nothing_is_refused(
    tmp_path: Path, frame: pd.DataFrame, params: dict[str, Any], message: str
) -> None:
    path = tmp_path / "table.parquet"
    frame.to_parquet(path)
    with pytest.raises(DataError, match=re.escape(message)):
        build_rows(str(path), str(tmp_path), RowParams(target="y", **params))


def test_preparation_is_fitted_on_the_training_rows_alone(tmp_path: Path) -> None:
    """Other rows of validation and test change neither a mean, nor a value of a category, nor a part of a date."""
    frame = dated().assign(word="a", split=np.array(["train", "train", "valid", "test"])[np.arange(400) % 4])
    frame.loc[::3, "word"] = "b"
    other = frame.copy()
    held = other["split"] != "train"
    other.loc[held, "x"] *= 1000
    other.loc[held, "word"] = "c"
    other.loc[held, "seen"] += pd.Timedelta(days=5000)
    other.loc[other["split"] == "test", "x"] = np.nan  # which the training rows never lack
    parts = []
    for number, given in enumerate((frame, other)):
        folder = tmp_path / str(number)
        folder.mkdir()
        manifest = build_table(folder, "y", given, split_by="split", missing="mean").manifest()
        parts.append({name: manifest[name] for name in ("normalisation", "columns", "excluded")})
        assert [column["missing"] for column in manifest["inputs"] if column["name"] == "x"] == [bool(number)]
    parts[0]["normalisation"]["target"] = parts[1]["normalisation"]["target"]
    assert parts[0] == parts[1]


@pytest.mark.parametrize(("rows", "like_id"), [(58_000, True), (200_000, False)])
def test_numbers_whose_range_has_no_room_for_one_each_are_no_identifier(rows: int, like_id: bool) -> None:
    """Of those that were sampled nearly all differ in both cases."""
    column, random = NumberColumn("n", "n"), np.random.default_rng(0)
    values = random.permutation(rows) if like_id else random.integers(0, 100_000, rows)
    column.learn(pa.array(values), np.ones(rows, dtype=bool), 0, rows // 2000)
    assert len(np.unique(pa.chunked_array(column.sampled))) >= 0.95 * sum(map(len, column.sampled))
    assert column.is_like_id == like_id
