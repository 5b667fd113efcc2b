"""Checks: what makes prices unusable fails, what a person should know is told, what no window may touch is masked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from price_files import assert_nothing_half_written, long_frame, save, write

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.validation import Validation, validate_prices

BLOCKING = {"positive_prices", "trading_sessions"}


def failed(validation: Validation) -> set[str]:
    return {check.name for check in validation.checks if not check.passed}


def examples(validation: Validation, name: str) -> list[str]:
    return next(check.metadata["examples"] for check in validation.checks if check.name == name)


def with_cell(row: int, **cells: float) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda frame: frame.assign(**{name: frame[name].mask(frame.index == row, cells[name]) for name in cells})


def on_saturday(frame: pd.DataFrame) -> pd.DataFrame:
    """A row of AAA on the day after a Friday."""
    friday = frame.index[(frame["date"].dt.day_of_week == 4) & (frame["ticker"] == "AAA")][20]
    extra = frame.loc[[friday]].assign(date=frame.loc[friday, "date"] + pd.Timedelta(days=1))
    return pd.concat([frame.loc[:friday], extra, frame.loc[friday + 1 :]], ignore_index=True)


FAULTS = {
    "zero price": (with_cell(50, adj_close=0.0), "positive_prices", "AAA 2015-03-17"),
    "negative price": (with_cell(350, adj_close=-1.0), "positive_prices", "BBB 2015-03-17"),
    "Saturday": (on_saturday, "trading_sessions", "AAA 2015-05-30"),
    "holiday": (with_cell(1, date=pd.Timestamp("2015-01-01")), "trading_sessions", "AAA 2015-01-01"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_makes_prices_unusable_fails_and_builds_no_dataset(fault: str, tmp_path: Path) -> None:
    change, check, example = FAULTS[fault]
    frame = long_frame(days=300)
    assert not failed(validate_prices(write(frame, tmp_path / "good"))) & BLOCKING
    changed = change(frame).sort_values(["ticker", "date"], kind="stable")
    ref = write(changed, tmp_path)
    validation = validate_prices(ref)
    assert failed(validation) & BLOCKING == {check}
    assert examples(validation, check) == [example]
    with pytest.raises(DataError, match=f"failed .*{check}.* no dataset is built"):
        build_dataset(ref, validation, str(tmp_path / "storage"))
    assert_nothing_half_written(tmp_path / "storage")


def standing_still(days: int, ratio: float = 1.0) -> pd.DataFrame:
    """AAA stands still from row 100 for some days, and is worth ``ratio`` times as much from then on."""
    frame = long_frame(days=300, tickers=["AAA"])
    price = frame["adj_close"].to_numpy().copy()
    price[100 + days :] *= ratio * price[100] / price[100 + days : 101 + days]
    price[100 : 100 + days] = price[100]
    return frame.assign(adj_close=price)


@pytest.mark.parametrize(
    ("days", "ratio", "warned", "masked"),
    [
        (5, 1.01, False, None),
        (21, 1.01, True, None),
        (22, 1.01, True, (100, 121)),
        (30, 1.01, True, (100, 129)),
        (30, 1 / 3, True, (100, 130)),
        (30, 1.5, True, (100, 129)),
        (200, 1.0, True, (100, 299)),
    ],
)
def test_how_long_a_price_may_stand_still(
    days: int, ratio: float, warned: bool, masked: tuple[int, int] | None, tmp_path: Path
) -> None:
    """The first of the equal prices may have moved: more than 5 days after it are told, more than 20 masked."""
    frame = standing_still(days, ratio)
    validation = validate_prices(write(frame, tmp_path))
    assert ("stale_prices" in failed(validation)) == warned
    dates = frame["date"].dt.strftime("%Y-%m-%d")
    expected = [] if masked is None else [(dates[masked[0]], dates[masked[1]])]
    assert [(mask.first, mask.last) for mask in validation.masks] == expected


@pytest.mark.parametrize(
    ("ratio", "is_masked"),
    [(2.0, True), (0.5 * 1.025, True), (1 / 3 / 1.025, True), (0.1, True), (1.5, False), (0.481, False)],
)
def test_a_jump_like_a_split_is_masked_and_in_no_target(ratio: float, is_masked: bool, tmp_path: Path) -> None:
    """2.5 % of the day itself are allowed for. A real loss of 52 %, as Apple's on 2000-09-29, is left."""
    frame = long_frame(days=300, tickers=["AAA", "BBB"])
    price, row = frame["adj_close"].to_numpy().copy(), 150
    price[row:300] *= ratio * price[row - 1] / price[row]
    frame = frame.assign(adj_close=price)
    prices = write(frame, tmp_path)
    validation = validate_prices(prices)
    day = str(frame["date"][row].date())
    assert [(mask.ticker, mask.first, mask.last) for mask in validation.masks] == [("AAA", day, day)] * is_masked
    assert "large_moves" in failed(validation)
    built = build_dataset(prices, validation, str(tmp_path), DatasetParams(window=10))
    assert [mask["first"] for mask in built.manifest()["masks"]] == [day] * is_masked
    rows = pd.concat(pd.read_parquet(Path(built.uri, shard["path"])) for shard in built.manifest()["shards"])
    largest = rows[["target_return", "log_return"]].abs().max().max()
    assert (largest < 0.2) == is_masked


def test_gaps_and_survivors_are_told(tmp_path: Path) -> None:
    frame = long_frame(days=300)
    whole, holed = (validate_prices(write(rows, tmp_path)) for rows in (frame, frame.drop(index=[200, 201, 599])))
    assert "survivorship" in failed(whole)
    assert "calendar_gaps" not in failed(whole)
    assert "survivorship" not in failed(holed)
    assert examples(holed, "calendar_gaps") == ["AAA: sessions are missing before 2015-10-21"]


@pytest.mark.parametrize("calendar", ["NEWYORK", ""])
def test_an_unknown_calendar_is_refused(calendar: str, tmp_path: Path) -> None:
    ref = write(long_frame(), tmp_path)
    with pytest.raises(DataError, match=rf"calendar='{calendar}' \(DTRAIN_OPTIONS\) is not an exchange calendar.*XNYS"):
        validate_prices(ref, calendar)


@pytest.mark.parametrize("first", ["1801-01-01", "1950-01-04"])
def test_days_that_a_calendar_does_not_know_are_refused(first: str, tmp_path: Path) -> None:
    days = pd.bdate_range("2020-01-02", periods=100).strftime("%Y-%m-%d")
    frame = pd.DataFrame({"date": [first, *days], "AAA": np.linspace(1, 2, 101)})
    ref = write_prices(price_source(save(frame, tmp_path / "old.csv")), str(tmp_path))
    with pytest.raises(DataError, match=rf"calendar='XKRX' \(DTRAIN_OPTIONS\) does not cover {first}"):
        validate_prices(ref, "XKRX")


@pytest.mark.parametrize("calendar", [None, "none", "None"])
def test_without_a_calendar_every_day_is_a_session(calendar: str | None, tmp_path: Path) -> None:
    days = pd.date_range("2020-01-01", periods=300)
    frame = pd.DataFrame({"date": days, "BTC": long_frame(days=300, tickers=["A"])["adj_close"]}).drop(
        index=range(100, 110)
    )
    validation = validate_prices(write(frame, tmp_path), calendar)
    assert not failed(validation) & BLOCKING
    assert examples(validation, "calendar_gaps") == ["BTC: sessions are missing before 2020-04-20"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("positive_prices", {"adj_close": [1.0, np.inf, 1.0, 1.0]}),
        ("positive_prices", {"adj_close": [1.0, np.nan, 1.0, 1.0]}),
        ("unique_sorted_rows", {"date": ["2015-01-02", "2015-01-05", "2015-01-05", "2015-01-06"]}),
        ("unique_sorted_rows", {"date": ["2015-01-02", "2015-01-06", "2015-01-05", "2015-01-07"]}),
    ],
)
def test_a_stored_file_that_somebody_changed_fails(name: str, values: dict[str, list], tmp_path: Path) -> None:
    """`write_prices` refuses these; in a file that was changed afterwards the checks find them."""
    ref = write(long_frame(days=4, tickers=["AAA"]), tmp_path)
    frame = pd.read_parquet(ref.path).assign(**values)
    frame["date"] = pd.to_datetime(frame["date"]).dt.date
    frame.to_parquet(ref.path)
    assert name in failed(validate_prices(ref))
