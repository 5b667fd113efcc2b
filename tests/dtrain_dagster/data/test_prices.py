"""Any price file becomes one shape, or is refused with the place and the remedy, and nothing is left behind."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import uuid
from pathlib import Path

import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from price_files import assert_nothing_half_written, long_frame, save, sessions, walk, write

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.price_views import MOST_DAYS
from dtrain_dagster.data.prices import iter_tickers, write_prices
from dtrain_dagster.data.sources import price_source

BAD_FILES = {
    "empty file": ("", ["is empty: no header and no rows"]),
    "header only, long": ("date,ticker,adj_close\n", ["has a header but no prices"]),
    "header only, wide": ("date,AAA,BBB\n", ["has a header but no prices"]),
    "no date column": ("when,ticker,adj_close\n2020-01-02,AAA,1\n", ["no column 'date'", "when"]),
    "no ticker column": ("date,adj_close\n2020-01-02,1\n", ["no column 'ticker'", "adj_close"]),
    "no price column": ("date,ticker,colour\n2020-01-02,AAA,1\n", ["no column 'adj_close'", "colour"]),
    "dates only": ("date\n2020-01-02\n2020-01-03\n", ["no column besides 'date'"]),
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
    "text in volume": ("date,ticker,adj_close,volume\n2020-01-02,AAA,1,many\n", ["line 2", "volume holds 'many'"]),
    "a row twice": (
        "date,ticker,adj_close\n2020-01-02,AAA,1\n2020-01-02,BBB,1\n2020-01-02,AAA,2\n",
        ["line 4", "AAA has 2020-01-02 a second time"],
    ),
    "out of order": (
        "date,ticker,adj_close\n2020-01-03,AAA,1\n2020-01-02,BBB,1\n2020-01-02,AAA,2\n",
        ["line 4", "AAA goes back from 2020-01-03 to 2020-01-02", "sort"],
    ),
    "no date": ("date,ticker,adj_close\n2020-01-02,AAA,1\nsoon,AAA,1\n", ["line 3", "date holds 'soon'", "2020-01-31"]),
    "day first": ("date,ticker,adj_close\n31/12/2020,AAA,1\n", ["line 2", "date holds '31/12/2020'"]),
    "a day that never was": ("date,ticker,adj_close\n2021-02-29,AAA,1\n", ["line 2", "date holds '2021-02-29'"]),
    "a day without end": ("date,ticker,adj_close\ninfinity,AAA,1\n", ["line 2", "date holds 'infinity'"]),
    "no name": ("date,ticker,adj_close\n2020-01-02,AAA,1\n2020-01-03,,1\n", ["line 3", "ticker is empty"]),
    "two columns of one name": ("date,BRK-B,BRK_B\n2020-01-02,1,2\n", ["two columns are called 'BRK-B'"]),
    "a column twice": ("date,AAA,BBB,AAA\n2020-01-02,1,2,3\n", ["two columns are called 'AAA'"]),
    "thousands that are whole": (
        "date,ticker,adj_close\n2020-01-02,AAA,999\n2020-01-03,AAA,1,234\n",
        ["line 3 has a cell in column 4, which has no name"],
    ),
    "an index that does not count": ("Unnamed: 0,date,AAA\n0.5,2020-01-02,1\n", ["'Unnamed: 0' is the index"]),
    "nothing but an index": (",date\n0,2020-01-02\n", ["no column besides 'date'"]),
    "a word after the day": ("date,AAA\n2020-01-02 early,1\n", ["line 2", "date holds '2020-01-02 early'"]),
    "several problems": (
        "date,ticker,adj_close,volume\n2020-01-02,AAA,x,1\nsoon,AAA,1,many\n",
        ["3 problems:", "line 2, ticker 'AAA': adj_close holds 'x'", "line 3, ticker 'AAA': date holds", "volume h"],
    ),
    "no text": ("\x00\x01\x02" * 100, ["bad.csv"]),
}


def write_address(address: str, storage: Path) -> dict[str, pd.DataFrame]:
    return dict(iter_tickers(write_prices(price_source(address), str(storage))))


def test_rows_beyond_all_days_are_refused_before_they_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticker is held as a whole; how much that is must not be up to the file."""
    monkeypatch.setattr(pa, "concat_tables", lambda tables: pytest.fail("a whole ticker was put together"))
    path = tmp_path / "same.csv"
    path.write_text("date,ticker,adj_close\n" + "2020-01-02,AAA,1\n" * (MOST_DAYS + 1))
    with pytest.raises(DataError, match="line 3: AAA has 2020-01-02 a second time"):
        write_prices(price_source(str(path)), str(tmp_path / "storage"))


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


FORMS = [
    "long.csv",
    "wide.csv",
    "long.csv.gz",
    "long.csv.zst",
    "wide.csv.gz",
    "long.parquet",
    "dates.parquet",
    "wide.parquet",
    "remote",
]


@pytest.mark.parametrize("form", FORMS)
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


def test_open_high_low_close_and_volume_are_kept(tmp_path: Path) -> None:
    frame = long_frame(days=30, tickers=["AAA"])
    frame = frame.assign(
        Open=walk(30, 1), High=walk(30, 2), Low=walk(30, 3), Close=walk(30, 4), Volume=np.arange(30), colour="x"
    ).rename(columns={"adj_close": "Adj Close", "date": "Date", "ticker": "Symbol"})
    frame.loc[3, "Open"] = np.nan
    [found] = write_address(save(frame, tmp_path / "ohlcv.csv"), tmp_path).values()
    assert list(found) == ["ticker", "date", "adj_close", "open", "high", "low", "close", "volume"]
    for name in ("Adj Close", "Open", "High", "Low", "Close", "Volume"):
        np.testing.assert_array_equal(found[name.lower().replace(" ", "_")], frame[name].astype(float))


def test_a_name_with_a_quote_in_it(tmp_path: Path) -> None:
    wide = pd.DataFrame({"date": sessions(3).strftime("%Y-%m-%d"), 'A"B': [1.0, 2, 3], "O'C": [4.0, 5, 6]})
    found = write_address(save(wide, tmp_path / "it's wide.csv"), tmp_path)
    assert {name: list(part["adj_close"]) for name, part in found.items()} == {'A"B': [1, 2, 3], "O'C": [4, 5, 6]}


def test_the_same_content_is_written_once(tmp_path: Path) -> None:
    frame = long_frame()
    first, again = write(frame, tmp_path), write(frame, tmp_path, "copy.csv")
    other = write(frame.assign(adj_close=frame["adj_close"] + 0.01), tmp_path)
    assert (first.built, again.built, other.built) == (True, False, True)
    assert first.uri == again.uri
    assert other.prices_id != first.prices_id
    assert len(list((tmp_path / "storage" / "prices").iterdir())) == 2


def test_the_manifest_says_where_prices_are_from(panel) -> None:
    source = panel.prices.manifest()["source"]
    assert source["sha256"].startswith("ee21cac28b")
    assert "BSD-3-Clause" in source["licence"]
    assert "survivorship" in source["notes"]
    assert source["is_synthetic"] is False
    assert (source["rows"], source["tickers"]) == (166_260, 20)
    assert (source["first_date"], source["last_date"]) == ("1990-01-02", "2022-12-28")


def test_the_other_bundled_panel(tmp_path: Path) -> None:
    found = write_address("us_ohlcv", tmp_path)
    assert list(found) == ["AAPL", "FB", "GOOG", "IBM", "MSFT"]
    assert sum(map(len, found.values())) == 12_154
    assert {"open", "high", "low", "close", "volume"} <= set(found["FB"])


FILL_DISK = """
import resource, sys, json
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sources import price_source
try:
    write_prices(price_source(sys.argv[1]), sys.argv[2])
except OSError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [10_000, 100_000])
def test_a_full_disk_is_no_fault_of_the_file_and_leaves_nothing(limit: int, tmp_path: Path) -> None:
    """The limit on a file's size stands in for the disk: small for the first bytes, larger for a later moment."""
    address = save(long_frame(days=2000, tickers=[f"T{number}" for number in range(20)]), tmp_path / "prices.csv")
    command = [sys.executable, "-c", FILL_DISK, address, str(tmp_path), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert re.search("no room to sort|File too large", json.loads(done.stdout))
    assert not list((tmp_path / "prices").iterdir())
    assert write_prices(price_source(address), str(tmp_path)).built


MIDNIGHTS = ["2016-01-03", "2016-01-04", "2016-07-04"]


def days_of(path: Path, storage: Path, calendar: str | None = None) -> list[str]:
    ref = write_prices(price_source(str(path)), str(storage), calendar=calendar)
    [frame] = dict(iter_tickers(ref)).values()
    return frame["date"].dt.strftime("%Y-%m-%d").tolist()


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("times", "zone", "calendar", "days"),
    [
        (MIDNIGHTS, "Asia/Tokyo", None, MIDNIGHTS),
        (MIDNIGHTS, "Europe/Berlin", "XNYS", MIDNIGHTS),
        (["2016-01-04 23:30", "2016-07-04 23:30"], "America/New_York", None, ["2016-01-04", "2016-07-04"]),
        (["2016-01-04 16:30", "2016-07-04 16:30"], "Europe/London", None, ["2016-01-04", "2016-07-04"]),
        (MIDNIGHTS, "+05:30", None, MIDNIGHTS),
        (MIDNIGHTS, "-03:00", None, MIDNIGHTS),
        (MIDNIGHTS, "UTC", "XNYS", MIDNIGHTS),
        (MIDNIGHTS, None, "XTKS", MIDNIGHTS),
        (["2016-01-03 15:00", "2016-01-04 15:00"], "UTC", "XTKS", ["2016-01-04", "2016-01-05"]),
        (["2016-01-04 05:00", "2016-07-05 04:00"], "UTC", "XNYS", ["2016-01-04", "2016-07-05"]),
        (["2016-01-04 00:00", "2016-07-03 23:00"], "UTC", "XLON", ["2016-01-04", "2016-07-04"]),
    ],
)
def test_a_day_is_that_of_its_own_zone_or_of_the_exchange(
    form: str, times: list[str], zone: str | None, calendar: str | None, days: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / f"prices.{form}"
    dates = pd.to_datetime(pd.Series(times)).dt.tz_localize(zone)
    frame = pd.DataFrame({"AAA": np.arange(1.0, 1 + len(times))}, index=pd.Index(dates, name="Date"))
    frame.to_csv(path) if form == "csv" else frame.to_parquet(path)
    for machine in ("UTC", "Asia/Tokyo", "America/New_York"):
        monkeypatch.setenv("TZ", machine)
        assert days_of(path, tmp_path / machine, calendar) == days
    assert len({found.name for found in tmp_path.glob("*/prices/*") if found.is_dir()}) == 1, "one id"


def test_times_in_utc_have_no_day_without_an_exchange(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text("date,AAA\n2016-01-03T00:00:00Z,1\n2016-01-03T15:00:00Z,1\n")
    with pytest.raises(DataError, match=r"line 3: '2016-01-03T15:00:00Z' is a time in UTC.*DTRAIN_CALENDAR"):
        days_of(path, tmp_path)
    path.write_text("date,AAA\n2016-01-03T15:00:00Z,1\n2016-01-04T15:00:00Z,1\n")
    assert days_of(path, tmp_path, "XTKS") == ["2016-01-04", "2016-01-05"]
    assert days_of(path, tmp_path, "XNYS") == ["2016-01-03", "2016-01-04"], "under another id"
    path.write_text("date,AAA\n20160104,1\n20160105,1\n")
    assert days_of(path, tmp_path) == ["2016-01-04", "2016-01-05"]


TUPLES = {
    ("Close", "AAA"): [1.0, 2.0], ("Close", "BBB"): [3.0, np.nan], ("Volume", "AAA"): [5, 6], ("Volume", "BBB"): [7, 8]
}  # fmt: skip


@pytest.mark.parametrize("form", ["csv", "parquet", "unnamed.csv"])
def test_columns_with_two_levels_of_names(form: str, tmp_path: Path) -> None:
    """As `yfinance.download` returns them, for one ticker and for many."""
    path, index = tmp_path / f"p.{form}", pd.Index(pd.to_datetime(["2020-01-02", "2020-01-03"]), name="Date")
    frame = pd.DataFrame(TUPLES, index=index)
    if form != "unnamed.csv":
        frame.columns.names = ["Price", "Ticker"]
    frame.to_parquet(path) if form == "parquet" else frame.to_csv(path)
    ref = write_prices(price_source(str(path)), str(tmp_path))
    found = {name: part[["adj_close", "volume"]].to_numpy().tolist() for name, part in iter_tickers(ref)}
    assert found == {"AAA": [[1, 5], [2, 6]], "BBB": [[3, 7]]}
    assert "there is no adjusted close: 'Close' is taken" in ref.manifest()["columns"][0]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_an_index_is_no_ticker(form: str, tmp_path: Path) -> None:
    wide = pd.DataFrame({"date": sessions(9).strftime("%Y-%m-%d"), "AAA": walk(9)})
    counted = wide.iloc[[2, 3, 5, 8]]  # as of a table that was filtered
    named = wide.assign(index=range(100, 109))
    shuffled = named.assign(index=[3, 1, 2, 0, 8, 7, 6, 5, 4])
    real = wide.assign(index=walk(9, 1))
    dated = wide.set_index(pd.to_datetime(wide.pop("date")).rename(None))
    for number, (frame, tickers) in enumerate(
        [(counted, ["AAA"]), (named, ["AAA"]), (shuffled, ["AAA"]), (real, ["AAA", "index"]), (dated, ["AAA"])]
    ):
        path = tmp_path / f"{number}.{form}"
        frame.to_csv(path) if form == "csv" else frame.to_parquet(path)
        ref = write_prices(price_source(str(path)), str(tmp_path))
        assert list(dict(iter_tickers(ref))) == tickers
        told = [note for note in ref.manifest()["columns"] if "counts rows" in note]
        assert len(told) >= (number in (0, 1, 2)), "what is left out is told"
