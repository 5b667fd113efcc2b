"""The files of a table: CSV becomes what its cells are, several files are one table, and all that is wrong is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.rows import RowParams, build_rows
from dtrain_dagster.data.table_columns import exact_numbers, numbers_of
from dtrain_dagster.data.table_file import files_of, open_table
from tests.kinds import WORDS, build_table, original_rows, table


def test_files_need_the_same_columns_of_any_width_and_order(tmp_path: Path) -> None:
    frame = table(900)[["x", "colour", "level"]]
    files = tmp_path / "many"
    files.mkdir()
    parts = [frame[:300], frame[300:600], frame[600:]]
    kinds = [pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.large_string()), pa.string()]
    for number, (part, kind, whole) in enumerate(zip(parts, kinds, [pa.int64(), pa.int8(), pa.float64()], strict=True)):
        plain = pa.Table.from_pandas(part, preserve_index=False)
        columns = {
            "x": plain["x"],
            "colour": plain["colour"].combine_chunks().cast(kind),
            "level": plain["level"].cast(whole),
        }
        order = list(columns) if number else list(columns)[::-1]
        pq.write_table(pa.table({name: columns[name] for name in order}), files / f"{number}.parquet")
    made = build_rows(str(files), str(tmp_path), RowParams(target="level"))
    assert made.manifest()["classes"] == ["0", "1", "2"]
    rows = pd.concat(original_rows(made).values()).sort_values("x")
    given = frame.sort_values("x")
    assert [sorted(WORDS)[int(code) - 1] for code in rows["colour"]] == given["colour"].tolist()
    assert rows["level"].tolist() == given["level"].tolist()
    pq.write_table(pa.table({"x": ["a"], "colour": ["red"], "level": [1]}), files / "3.parquet")
    with pytest.raises(DataError, match=r"'x' is number in .*0.parquet and string in .*3.parquet: convert"):
        build_rows(str(files), str(tmp_path), RowParams(target="level"))


CSV = """when,n,part,share,yes,code,huge,empty,word,y
2020-01-02,1,,0.5,true,007,12345678901234567890,,a,0
2020-01-03 12:00,2,NA,1e3,FALSE,110,12345678901234567891,,"b, c",1
2020-01-04T00:00:00+09:00,3,3,-4,true,220,12345678901234567892,,a,0
"""


def test_csv_has_the_types_that_all_of_its_cells_have(tmp_path: Path) -> None:
    lines = CSV.splitlines()
    for name, content in [
        ("t.csv", "\n".join(lines)),
        ("t.tsv", "\n".join(lines).replace('"b, c"', "b").replace(",", "\t")),
    ]:
        (tmp_path / name).write_text(content)
        table = open_table(files_of(tmp_path / name), tmp_path)
        assert not table.problems
        [(_, batch)] = table.batches(list(table.kinds))
        found = {
            name: numbers_of(batch.column(name)).tolist()
            for name, kind in table.kinds.items()
            if kind in ("number", "date")
        }
        assert found["when"] == [18263.0, 18264.5, 18264.625]
        assert (found["n"], found["share"], found["yes"], found["y"]) == (
            [1, 2, 3],
            [0.5, 1000, -4],
            [1, 0, 1],
            [0, 1, 0],
        )
        assert np.isnan(found["part"][:2]).all()
        assert found["part"][2] == 3
        assert [int(value) for value in exact_numbers(batch.column("huge"))[0]] == [
            12345678901234567890 + n for n in range(3)
        ]
        assert (table.kinds["code"], table.kinds["word"], table.kinds["empty"]) == ("category", "category", "")
        assert batch.column("code").to_pylist() == ["007", "110", "220"]


def test_csv_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    frame = table()
    frame.to_csv(tmp_path / "t.csv.gz", index=False)
    one = original_rows(build_table(tmp_path, "value", frame))
    params = RowParams(target="value", drop=("bought", "level"))
    for split, rows in original_rows(build_rows(str(tmp_path / "t.csv.gz"), str(tmp_path), params)).items():
        pd.testing.assert_frame_equal(rows, one[split])


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    frame = table().assign(
        day=pd.Timedelta("1D"), n=1_700_000_000_000_000_000 + np.arange(1200), name=[f"n{n}" for n in range(1200)]
    )
    frame.loc[5, "x"], frame.loc[9, "value"] = np.nan, np.nan
    with pytest.raises(DataError) as error:
        build_table(tmp_path, "value", frame, split_by="colour")
    for said in (
        "5 problems:",
        "'day' has the type",
        "'x' lacks 1",
        "'n' has 1,200",
        "'name' has more",
        "'value' is missing",
    ):
        assert said in str(error.value)
    lines = [
        "n,day,share,word,n2,y",
        *(f'{n},2020-01-{n % 28 + 1:02d},"{n},5",w,{n}.{n}.2020,0' for n in range(100)),
        "x,soon,1,w,1.1.2020,1",
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    with pytest.raises(DataError) as error:
        build_rows(str(tmp_path / "t.csv"), str(tmp_path), RowParams(target="y", split_by="gone", drop=("word",)))
    for said in (
        "line 102: the column 'n' holds 'x' among numbers",
        "'day' holds 'soon' among dates",
        "'share' has numbers with commas",
        "'n2' has dates that do not begin with the year",
        "--split-by gone: the table has no such column",
    ):
        assert said in str(error.value)
    (tmp_path / "t.csv").write_text("a,b,a\n1,2,3\n")
    with pytest.raises(DataError, match="has two columns with the name 'a'"):
        build_rows(str(tmp_path / "t.csv"), str(tmp_path), RowParams(target="b"))
