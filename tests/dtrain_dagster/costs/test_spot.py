"""Spot: how far its price has moved, how often its nodes are evicted, and what a plan says of both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from price_list import listing, price_list
from werkzeug import Request, Response

from dtrain_dagster.cli.main import main
from dtrain_dagster.costs import retail
from dtrain_dagster.costs.estimate import estimate_cost
from dtrain_dagster.costs.evictions import tell_evictions, tell_spot_price
from dtrain_dagster.costs.interval import Interval
from dtrain_dagster.costs.meters import RetailError
from dtrain_dagster.costs.prices import price_of, read_prices, refreshed_path, refreshed_prices
from dtrain_dagster.costs.retail import fetch_market
from dtrain_dagster.costs.spot import (
    EvictionRate,
    SpotMarket,
    kept_history,
    parse_eviction_band,
    spread_of,
)
from tests.dtrain_dagster.spot_prices import RATE, with_spot
from tests.loopback import LoopbackServer

T4, A100 = "Standard_NC4as_T4_v3", "Standard_NC24ads_A100_v4"
NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
AN_HOUR = Interval(low=3600.0, expected=3600.0, high=3600.0)


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("0-5", (0.0, 0.05)), ("15 - 20", (0.15, 0.2)), ("20+", (0.2, None)), ("", None), ("10-5", None),
        ("unknown", None), ("90-110", None), ("500+", None),
    ],
)  # fmt: skip
def test_a_band_of_evictions_is_read_or_left_out(text: str, ends: tuple[float, float | None] | None):
    assert parse_eviction_band(text) == ends


def test_a_band_without_an_upper_end_is_taken_at_its_lower_one():
    rate = EvictionRate(low=0.2, high=None, recorded_on="2026-11-20", source="x")
    assert (rate.expected, rate.most, str(rate)) == (0.2, 0.2, "20 % or more")
    assert (RATE.expected, RATE.most, str(RATE)) == (pytest.approx(0.075), 0.10, "5 to 10 %")


def test_the_spread_is_that_of_ninety_days_and_of_the_price_that_held_when_they_began():
    old, held, later = ("2026-01-01", 9.0), ("2026-08-01", 0.30), ("2026-10-01", 0.50)
    assert kept_history([later, old, held], "2026-11-20") == (held, later)
    found = spread_of((held, later), 0.40, "2026-11-20")
    assert found
    assert (found.low, found.high, found.since) == (0.30, 0.50, "2026-08-22")
    assert spread_of((), 0.40, "2026-11-20") is None
    assert spread_of((("2026-11-18", 0.39),), 0.40, "2026-11-20") is None, "two days tell nothing"


@given(
    st.lists(st.tuples(st.integers(0, 300), st.floats(0.01, 10)), max_size=12), st.floats(0.01, 10), st.integers(0, 300)
)
def test_the_price_of_the_day_is_within_its_spread(points: list[tuple[int, float]], usd: float, day: int):
    def date(number: int) -> str:
        return f"{datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=number):%Y-%m-%d}"

    history = kept_history([(date(number), price) for number, price in points if number <= day], date(day))
    found = spread_of(history, usd, date(day))
    assert found is None or found.low <= usd <= found.high


def test_what_is_not_known_of_spot_is_said_and_bounded_by_the_pay_as_you_go_price():
    """The package has a price of Spot, of 2024, and neither its history nor a rate of evictions."""
    price = price_of(A100, "eastus")
    found = estimate_cost(AN_HOUR, price, "spot", 2, startup_seconds=60.0)
    assert (found.usd.low, found.usd.expected) == pytest.approx((2 * 0.444433, 2 * 0.444433))
    assert found.usd.high == pytest.approx(2 * 3.673)
    assert "no history of it is known, so the interval reaches to the pay-as-you-go price of $3.673" in tell_spot_price(
        price, "spot"
    )
    said = tell_evictions(found.usd.expected, 2, price, "spot", 60.0)
    assert said.startswith("how often Spot nodes are evicted is not known")
    assert f"`dtrain cost --refresh --region eastus --sku {A100} --spot-history`" in said
    assert tell_spot_price(price, "dedicated") == tell_evictions(found.usd.expected, 2, price, "dedicated", 60.0) == ""


def test_what_is_known_of_spot_is_in_the_figures_and_said():
    price = with_spot(
        price_of(A100, "eastus"), evictions=RATE, recorded_on="2026-11-20", history=(("2026-06-01", 0.9),)
    )
    found = estimate_cost(AN_HOUR, price, "spot", 2, startup_seconds=600.0)
    slower = 1 + 0.075 * 2 * 600 / 3600
    assert found.usd.expected == pytest.approx(2 * 0.444433 * slower)
    assert found.usd.high == pytest.approx(found.seconds.high * 2 / 3600 * 0.9)
    assert "it has been $0.444433 to $0.9 an hour since 2026-08-22" in tell_spot_price(price, "spot")
    said = tell_evictions(found.usd.expected, 2, price, "spot", 600.0)
    assert said.startswith("evictions are expected to cost $0.0222 of it: 5 to 10 % of Spot nodes")
    assert "(Azure, 28 days to 2026-11-20)" in said
    assert "start-up of 10 min" in said


def test_a_refresh_keeps_the_earlier_prices_of_spot_as_its_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    path = refreshed_path()
    with price_list() as listed:
        for days, usd in ((30, 0.5), (10, 0.8), (0, 0.6)):
            listed.items = listing(T4, usd)
            retail.refresh_price_table(path, ["eastus"], [T4], listed.url, NOW - timedelta(days=days))
        figure = price_of(T4).figure("spot")
        assert figure.history == (("2026-10-28", 0.0625), ("2026-11-17", 0.1))
        assert figure.spread
        assert (figure.spread.low, figure.spread.high, figure.spread.since) == (0.0625, 0.1, "2026-10-28")
        assert price_of(T4).figure("dedicated").history == ()
        market = SpotMarket(history={T4: [("2026-09-01", 0.2)]}, evictions={T4: RATE})
        retail.refresh_price_table(path, ["eastus"], [T4], listed.url, NOW, ask_market=lambda *_: market)
        told = price_of(T4).figure("spot")
        assert told.spread
        assert (told.spread.high, told.evictions) == (0.2, RATE)
        retail.refresh_price_table(path, ["eastus"], [T4], listed.url, NOW + timedelta(days=1))
        assert price_of(T4).figure("spot").evictions == RATE, "a refresh without a login does not forget it"
    assert refreshed_prices(path)["eastus", T4, "spot"] == price_of(T4).figure("spot")
    shown = CliRunner().invoke(main, ["cost", "--sku", T4, "--json"])
    spot = next(row for row in json.loads(shown.output) if row["region"] == "eastus")["usd_per_hour"]["spot"]
    assert (spot["spread"]["high"], spot["evictions"]["low"]) == (0.2, 0.05)


@contextmanager
def resource_graph(asked: list[tuple[str | None, str]], status: int = 200, data: object = None) -> Iterator[str]:
    """Azure Resource Graph on loopback, with rows in the shape of Microsoft's sample queries of SpotResources."""

    def answer(request: Request) -> Response:
        query = json.loads(request.data)["query"]
        asked.append((request.headers.get("Authorization"), query))
        rows = data
        if rows is None and "pricehistory" in query:
            prices = [
                {"priceUSD": "0.0627", "effectiveDate": "2026-11-01T00:00:00Z"},
                {"priceUSD": 0.09, "effectiveDate": "2026-09-01T00:00:00.000Z"},
            ]
            rows = [{"skuName": T4.lower(), "spotPrices": prices}, {"skuName": "standard_other", "spotPrices": []}]
        elif rows is None:
            rows = [{"skuName": T4.lower(), "evictionRate": "5-10"}, {"skuName": A100.lower(), "evictionRate": "?"}]
        return Response(json.dumps({"count": 2, "data": rows}), status)

    with LoopbackServer(answer) as server:
        yield server.url_for("/resources")


def test_resource_graph_is_asked_for_both_with_the_login():
    asked: list[tuple[str | None, str]] = []
    with resource_graph(asked) as url:
        found = fetch_market("eastus", [T4, A100], "secret", url, NOW)
    assert found.history == {T4: [("2026-09-01", 0.09), ("2026-11-01", 0.0627)]}
    assert set(found.evictions) == {T4}, "a band that is none is left out"
    assert replace(found.evictions[T4], source="", recorded_on="") == replace(RATE, source="", recorded_on="")
    assert found.evictions[T4].recorded_on == "2026-11-27"
    assert [token for token, _ in asked] == ["Bearer secret"] * 2
    assert all("location =~ 'eastus'" in query and "'standard_nc4as_t4_v3'" in query for _, query in asked)
    assert "osType =~ 'linux'" in asked[0][1]


@pytest.mark.parametrize(
    ("status", "data", "said"),
    [
        (403, None, "answers 403"), (200, "none", "not answer with a table"),
        (200, [{"skuName": 7}], "not answer with a history of Spot"),
        (200, [{"skuName": T4, "spotPrices": [{"priceUSD": "cheap"}]}], "not answer with a history of Spot"),
    ],
)  # fmt: skip
def test_an_answer_of_resource_graph_that_cannot_be_used_is_refused(status: int, data: object, said: str):
    with resource_graph([], status, data) as url, pytest.raises(RetailError, match=said):
        fetch_market("eastus", [T4], "secret", url, NOW)


def test_a_damaged_history_is_a_damaged_table():
    row = [0.06, "s", {"history": [["soon", 0.06]]}]
    document = {
        "currency": "USD",
        "sources": {"s": {"how": "asked", "recorded_on": "2026-11-27", "source": "x"}},
        "prices": {"eastus": {T4: {"spot": row}}},
    }
    with pytest.raises(ValueError, match="soon"):
        read_prices(document)
