"""Which windows there are, against a count the long way over random gaps, masks, windows and splits."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from price_files import long_frame, sessions, write

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.features import FEATURES, TARGET
from dtrain_dagster.data.sharding import SPLITS, DatasetParams, build_dataset
from dtrain_dagster.data.validation import Mask, Validation

DAYS = 130
CALENDAR = [str(day.date()) for day in sessions(DAYS)]
WARM_UP = 22
NAMES = ("AAA", "BBB", "CCC")


@st.composite
def markets(draw: st.DrawFn) -> tuple[pd.DataFrame, tuple[Mask, ...], DatasetParams]:
    tickers = NAMES[: draw(st.integers(1, 3))]
    frame = long_frame(DAYS, tickers)
    place = st.integers(0, len(frame) - 1)
    frame = frame.drop(index=draw(st.sets(place, max_size=4)))
    starts = draw(
        st.lists(st.tuples(st.sampled_from(tickers), st.integers(0, DAYS - 1), st.integers(0, 30)), max_size=2)
    )
    masks = tuple(
        Mask(ticker=name, first=CALENDAR[first], last=CALENDAR[min(first + length, DAYS - 1)], reason="a test")
        for name, first, length in starts
    )
    params = DatasetParams(
        window=draw(st.integers(2, 12)),
        horizon=draw(st.integers(1, 6)),
        train_last=CALENDAR[draw(st.integers(50, 80))],
        valid_last=CALENDAR[draw(st.integers(82, 110))],
        shards=draw(st.integers(1, 3)),
    )
    return frame, masks, params


def windows(frame: pd.DataFrame, masks: tuple[Mask, ...], params: DatasetParams) -> dict[str, set[tuple[str, str]]]:
    """(ticker, last day) of every window by split: each day of window, warm-up and label is there and unmasked."""
    assert params.train_last is not None
    assert params.valid_last is not None
    found: dict[str, set[tuple[str, str]]] = {split: set() for split in SPLITS}
    for name, part in frame.groupby("ticker"):
        usable = set(part["date"].dt.strftime("%Y-%m-%d"))
        for mask in masks:
            if mask.ticker == name:
                usable -= {day for day in usable if mask.first <= day <= mask.last}
        needed = WARM_UP + params.window
        for end in range(needed - 1, DAYS - params.horizon):
            if not usable.issuperset(CALENDAR[end - needed + 1 : end + params.horizon + 1]):
                continue
            day, label = CALENDAR[end], CALENDAR[end + params.horizon]
            if label <= params.train_last:
                found["train"].add((str(name), day))
            elif params.train_last < day and label <= params.valid_last:
                found["valid"].add((str(name), day))
            elif params.valid_last < day:
                found["test"].add((str(name), day))
    return found


@pytest.mark.long
@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(market=markets())
def test_windows_are_those_that_nothing_interrupts(
    market: tuple[pd.DataFrame, tuple[Mask, ...], DatasetParams],
) -> None:
    frame, masks, params = market
    expected = windows(*market)
    with tempfile.TemporaryDirectory() as folder:
        prices = write(frame, Path(folder))
        validation = Validation(checks=(), masks=masks)
        if not all(expected.values()):
            event("refused: a split without a window")
            with pytest.raises(DataError, match=r"has no window|no ticker has that many days"):
                build_dataset(prices, validation, folder, params)
            return
        dataset = build_dataset(prices, validation, folder, params)
        manifest = dataset.manifest()
        tables = [pd.read_parquet(Path(dataset.uri) / shard["path"]) for shard in manifest["shards"]]
    event(f"segments: {sum(len(shard['segments']) for shard in manifest['shards'])}")
    closes = {(row.ticker, str(row.date.date())): row.adj_close for row in frame.itertuples()}
    found: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
    for shard, table in zip(manifest["shards"], tables, strict=True):
        days = [str(day) for day in table["date"]]
        assert not table[list(FEATURES)].isna().to_numpy().any()
        for segment in shard["segments"]:
            first, stop = segment["rows"]
            begin = CALENDAR.index(days[first])
            assert days[first:stop] == CALENDAR[begin : begin + stop - first]  # consecutive sessions
            for split, (start, last) in segment["samples"].items():
                for end in range(start, last):
                    name, label = segment["ticker"], CALENDAR[CALENDAR.index(days[end]) + params.horizon]
                    assert first <= end - params.window + 1
                    assert end + params.horizon < stop
                    assert manifest["splits"][split]["first"] <= days[end]
                    assert label <= manifest["splits"][split]["last"]
                    move = np.log(closes[name, label]) - np.log(closes[name, days[end]])
                    assert table[TARGET].iloc[end] == pytest.approx(move, abs=1e-7)
                    found[split].append((name, days[end]))
    for split in SPLITS:
        assert len(found[split]) == len(set(found[split])) == dataset.samples[split]
        assert set(found[split]) == expected[split]


def test_the_first_return_after_a_gap_or_a_mask_is_in_no_window() -> None:
    """Its price jumps a hundredfold there; were the return used, the volatility of the next 22 days would tell."""
    frame = long_frame(300, ["AAA"])
    frame.loc[100:, "adj_close"] *= 100
    frame.loc[200:, "adj_close"] *= 100
    masks = (Mask(ticker="AAA", first=str(frame["date"][90].date()), last=str(frame["date"][99].date()), reason=""),)
    frame = frame.drop(index=[198, 199])
    with tempfile.TemporaryDirectory() as folder:
        prices = write(frame, Path(folder))
        dataset = build_dataset(prices, Validation(checks=(), masks=masks), folder, DatasetParams(window=10))
        [shard] = dataset.manifest()["shards"]
        table = pd.read_parquet(Path(dataset.uri) / shard["path"])
    assert [segment["rows"][1] - segment["rows"][0] for segment in shard["segments"]] == [90 - 22, 98 - 22, 100 - 22]
    assert table["log_rv_22"].max() < np.log(0.1)
    assert table["index_log_rv_22"].max() < np.log(0.1)
    assert table[TARGET].abs().max() < 1
