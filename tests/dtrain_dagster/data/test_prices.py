"""Any price file becomes one shape, or is refused with the place and the remedy, and nothing is left behind."""

from __future__ import annotations

import datetime
import gzip
import os
import uuid
from pathlib import Path

import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from price_files import assert_nothing_half_written, long_frame, write

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.prices import _tickers, iter_tickers, write_prices
from dtrain_dagster.data.sources import price_source

BAD_FILES = {
    "empty file": ("", ["is empty: no header and no rows"]),
    "header only, long": ("date,ticker,adj_close\n", ["has a header but no prices"]),
    "header only, wide": ("date,AAA,BBB\n", ["has a header but no prices"]),
    "text in a price, long": (
        "date,ticker,adj_close\n2020-01-02,AAA,1\n2020-01-03,AAA,abc\n",
        ["line 3", "'AAA'", "adj_close holds 'abc', not a number"],
    ),
    "text in a price, wide": ("date,AAA,BBB\n2020-01-02,1,2\n2020-01-03,1,n/a\n", ["line 3", "'BBB'", "'n/a'"]),
    "empty price, long": (
        "date,ticker,adj_close\n2020-01-02,AAA,1\n2020-01-03,AAA,\n",
        ["line 3", "adj_close is empty, not a number"],
    ),
    "a row cut short": ("date,ticker,adj_close\n2020-01-02,AAA,1\n2020-01-03,AAA\n", ["line 3", "adj_close is empty"]),
    "thousands": (
        "date,ticker,adj_close\n2020-01-02,AAA,999\n2020-01-03,AAA,1,234.5\n",
        ["line 3 has a cell in column 4, which has no name"],
    ),
    "infinite price": ("date,ticker,adj_close\n2020-01-02,AAA,inf\n", ["line 2", "holds 'inf'"]),
    "a row twice": (
        "date,ticker,adj_close\n2020-01-02,AAA,1\n2020-01-02,BBB,1\n2020-01-02,AAA,2\n",
        ["line 4", "AAA has 2020-01-02 a second time"],
    ),
    "no date": ("date,ticker,adj_close\n2020-01-02,AAA,1\nsoon,AAA,1\n", ["line 3", "date holds 'soon'", "2020-01-31"]),
    "day first": ("date,ticker,adj_close\n31/12/2020,AAA,1\n", ["line 2", "date holds '31/12/2020'"]),
    "a day without end": ("date,ticker,adj_close\ninfinity,AAA,1\n", ["line 2", "date holds 'infinity'"]),
    "no name": ("date,ticker,adj_close\n2020-01-02,AAA,1\n2020-01-03,,1\n", ["line 3", "ticker is empty"]),
    "a word after the day": ("date,AAA\n2020-01-02 early,1\n", ["line 2", "date holds '2020-01-02 early'"]),
    "several problems": (
        "date,ticker,adj_close,volume\n2020-01-02,AAA,x,1\nsoon,AAA,1,many\n",
        ["2 problems:", "line 2, ticker 'AAA': adj_close holds 'x'", "line 3, ticker 'AAA': date holds"],
    ),
    "no text": ("\x00\x01\x02" * 100, ["bad.csv"]),
}


def write_address(address: str, storage: Path) -> dict[str, pd.DataFrame]:
    return dict(iter_tickers(write_prices(price_source(address), str(storage))))


def test_a_day_that_is_there_twice_is_refused_before_more_of_its_ticker_is_held() -> None:
    """A ticker is held as a whole; how much that is must not be up to the file."""
    row = {"ticker": ["AAA"], "date": [datetime.date(2020, 1, 2)], "adj_close": [1.0]}
    batches = (pa.table(row | {"line": [line]}) for line in range(1, 10))
    with pytest.raises(DataError, match=r"p\.csv: line 3: AAA has 2020-01-02 a second time"):
        list(_tickers(batches, "p.csv", 1))
    assert len(list(batches)) == 7, "which were not read"


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_by_name_and_place(case: str, tmp_path: Path) -> None:
    content, expected = BAD_FILES[case]
    (tmp_path / "bad.csv").write_text(content)
    with pytest.raises(DataError) as error:
        write_address(str(tmp_path / "bad.csv"), tmp_path)
    for text in ["bad.csv", *expected]:
        assert text in str(error.value)
    assert not list((tmp_path / "prices").iterdir())


@pytest.mark.parametrize("name", ["half.csv.gz", "half.csv.zst", "half.parquet", "other.csv.gz", "other.csv.zst"])
def test_half_a_file_is_not_taken_for_all_of_it(name: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole.parquet"
    frame = long_frame()
    frame.to_parquet(whole)
    packed = gzip.compress(frame.to_csv(index=False).encode())
    dense = pa.Codec("zstd").compress(frame.to_csv(index=False).encode(), asbytes=True)
    content = {
        "half.csv.gz": packed[: len(packed) // 2],
        "half.csv.zst": dense[: len(dense) // 2],
        "half.parquet": whole.read_bytes()[:9000],
    }.get(name, b"not packed")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        write_address(str(tmp_path / name), tmp_path)
    assert not list((tmp_path / "prices").iterdir())


def expected_frames(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {name: part.reset_index(drop=True) for name, part in frame.groupby("ticker")}


@pytest.mark.parametrize("form", [
    "long.csv", "long.csv.gz", "long.csv.zst", "wide.csv.gz", "reversed.csv",
    "long.parquet", "dates.parquet", "wide.parquet", "remote",
])  # fmt: skip
def test_every_form_of_file_gives_the_same_prices(form: str, tmp_path: Path) -> None:
    frame = long_frame(tickers=("BBB", "AAA", "CC.D"))
    frame = frame.drop(index=range(30))  # BBB is listed later than the others
    wide = frame.pivot(index="date", columns="ticker", values="adj_close").reset_index()
    text = frame.assign(date=frame["date"].dt.strftime("%Y-%m-%d"))
    address = str(tmp_path / form)
    if form == "remote":
        address = f"memory://{uuid.uuid4().hex}/long.csv"
        with fsspec.open(address, "w") as file:
            frame.sample(frac=1, random_state=0).sort_values("date").to_csv(file, index=False)
    elif form.endswith(".zst"):
        content = frame.to_csv(index=False).encode()
        Path(address).write_bytes(pa.Codec("zstd").compress(content, asbytes=True))
    elif form == "reversed.csv":  # the newest day first
        frame[::-1].to_csv(address, index=False)
    elif form.startswith("long.csv") or form.startswith("wide.csv"):
        (wide if form.startswith("wide") else frame).to_csv(address, index=False)
    else:
        {"long.parquet": text, "dates.parquet": frame, "wide.parquet": wide}[form].to_parquet(address)
    found, expected = write_address(address, tmp_path), expected_frames(frame)
    assert list(found) == ["AAA", "BBB", "CC.D"]
    for name, part in expected.items():
        np.testing.assert_array_equal(found[name]["date"].to_numpy(), part["date"].to_numpy().astype("datetime64[s]"))
        np.testing.assert_array_equal(found[name]["adj_close"].to_numpy(), part["adj_close"].to_numpy())
    assert_nothing_half_written(tmp_path)


def test_one_row_group_per_ticker_however_the_file_is_sorted(tmp_path: Path) -> None:
    frame = long_frame(days=50, tickers=[f"T{number:03d}" for number in range(40)]).sort_values("date", kind="stable")
    ref = write(frame, tmp_path)
    file = pq.ParquetFile(ref.path)
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [50] * 40
    assert file.read()["ticker"].to_pylist() == sorted(frame["ticker"])
    assert (ref.rows, ref.tickers, ref.first_date) == (2000, 40, "2015-01-02")


def test_the_same_content_is_written_once(tmp_path: Path) -> None:
    frame = long_frame()
    first, again = write(frame, tmp_path), write(frame, tmp_path, "copy.csv")
    other = write(frame.assign(adj_close=frame["adj_close"] + 0.01), tmp_path)
    assert (first.built, again.built, other.built) == (True, False, True)
    assert first.uri == again.uri
    assert other.prices_id != first.prices_id
    assert len(list((tmp_path / "storage" / "prices").iterdir())) == 2


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_day_is_the_date_that_the_file_shows_and_a_time_has_none(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time is of another day in another zone, and a file does not say which one is the exchange's."""
    path, midnights = tmp_path / f"prices.{form}", ["2016-01-04", "2016-07-04"]

    def days_of(times: list[str], zone: str | None = None) -> list[str]:
        dates = pd.to_datetime(pd.Series(times)).dt.tz_localize(zone)
        frame = pd.DataFrame({"AAA": np.arange(1.0, 1 + len(times))}, index=pd.Index(dates, name="Date"))
        frame.to_csv(path) if form == "csv" else frame.to_parquet(path)
        [found] = write_address(str(path), tmp_path / os.environ["TZ"]).values()
        return found["date"].dt.strftime("%Y-%m-%d").tolist()

    for machine in ("Asia/Tokyo", "America/New_York"):
        monkeypatch.setenv("TZ", machine)
        assert days_of(midnights) == midnights
    for times, zone in ((["2016-01-04 16:30"], None), (midnights, "UTC"), (midnights, "Asia/Tokyo")):
        with pytest.raises(DataError, match=r"a date such as 2020-01-31, without a time|times with a zone: convert"):
            days_of(times, zone)
