"""The table of choices: arithmetic by hand, and what must hold whatever the figures are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain_dagster.assets.plan_page import choices_metadata
from dtrain_dagster.costs.estimate import Interval
from dtrain_dagster.costs.prices import price_of, price_table
from dtrain_dagster.planning.build_plan import (
    Choices,
    Limits,
    PlanChoice,
    compare_choices,
    explain_unavailable,
    is_sure,
    remedies,
)
from dtrain_dagster.settings.cluster_kinds import Tier
from dtrain_dagster.support.formatting import dollars
from tests.dtrain_dagster.planning.planned_nodes import planned_on

V100, T4, A100, QUAD = (f"Standard_{name}" for name in ("NC6s_v3", "NC4as_T4_v3", "NC24ads_A100_v4", "NC96ads_A100_v4"))
SPEEDS = {V100: 1.0, T4: 0.5, A100: 2.0, QUAD: 8.0}
PRICES = {sku: replace(price_of(sku), retired_on=None, speed=speed) for sku, speed in SPEEDS.items()}
PLANNED = planned_on(PRICES[V100], 2, batch=256)
BOTH: tuple[Tier, ...] = ("dedicated", "spot")
HOUR = 3600.0


@dataclass(frozen=True)
class Amdahl:
    """A training of which some is computed, on all nodes, and some is not."""

    fixed: float = 0.1 * HOUR
    computing: float = 12 * HOUR
    spread: float = 0.1
    basis: str = "probe"
    basis_words: str = "a probe of 24 steps on 2 nodes"
    measured: tuple[Any, ...] = (SimpleNamespace(node_count=2),)
    sizes: Any = PLANNED.sizes

    def seconds_at(self, node_count: int, speed: float = 1.0) -> Interval:
        whole = self.fixed + self.computing / node_count / speed
        return Interval(low=(1 - self.spread) * whole, expected=whole, high=(1 + self.spread) * whole)


def table_of(
    forecast: Any = None,
    planned: Any = PLANNED,
    deadline: float | None = None,
    budget: float | None = None,
    spent_usd: float = 0.0,
    spent_seconds: float = 0.0,
    **other: Any,
) -> Choices:
    """``deadline``: in seconds."""
    spent = {"spent_usd": spent_usd, "spent_seconds": spent_seconds}
    given: dict[str, Any] = {
        "prices": PRICES.values(),
        "node_counts": (1, 2, 3),
        "tiers": ("dedicated",),
        "today": date(2026, 3, 1),
    } | other
    limits = Limits(budget_usd=budget or 0.0, deadline_hours=(deadline or 0.0) / HOUR, **spent)
    return compare_choices(planned, forecast or Amdahl(), limits, **given)


def cheapest_of(table: Choices) -> PlanChoice:
    assert table.cheapest
    return table.cheapest


def row_of(table: Choices, sku: str, nodes: int, tier: str = "dedicated") -> Any:
    return next(row for row in table.rows if row.key == (sku, tier, nodes))


def test_time_and_dollars_by_hand_and_where_they_come_from():
    table = table_of(Amdahl(fixed=HOUR))
    two = row_of(table, V100, 2)
    assert table.planned is two
    assert two.seconds == Interval(low=0.9 * 7 * HOUR, expected=7 * HOUR, high=pytest.approx(1.1 * 7 * HOUR))
    assert two.usd.expected == pytest.approx(7 * 2 * 3.06)
    origins = [row_of(table, sku, count).time_from.split(":")[0] for sku, count in ((V100, 2), (V100, 3), (T4, 2))]
    assert origins == ["measured", "scaled to other nodes", "guessed"]
    assert "0.5 times as fast as one of Standard_NC6s_v3" in row_of(table, T4, 2).time_from
    assert row_of(table, T4, 2).seconds.expected == pytest.approx(13 * HOUR)
    assert "recorded 2025-11-04" in two.price_from
    costs = [row.usd.expected for row in table.rows]
    assert costs == sorted(costs)


@pytest.mark.parametrize(
    ("limits", "cheapest"),
    [
        ({}, (T4, 1)),
        ({"deadline": 9 * HOUR}, (T4, 3)),  # 8.1 h, and a tenth more at most
        ({"deadline": 8.8 * HOUR}, (A100, 1)),  # what is expected in 8.1 h may not keep it
        ({"deadline": 1.8 * HOUR, "budget": 30.0}, (QUAD, 1)),
        ({"deadline": 8 * HOUR, "budget": 23.0}, None),
    ],
)
def test_the_cheapest_that_keeps_both_limits_is_marked(limits: dict[str, float], cheapest: tuple[str, int] | None):
    table = table_of(**limits)
    found = table.cheapest
    assert (found and (found.price.sku, found.node_count)) == cheapest


def test_a_choice_of_spot_may_cost_as_much_as_pay_as_you_go_and_says_what_is_left_out():
    spot = row_of(table_of(tiers=BOTH, prices=[PRICES[V100]], node_counts=(2,)), V100, 2, "spot")
    assert spot.usd.expected == pytest.approx(2 * 6.1 * 0.3978)
    assert spot.usd.high == pytest.approx(spot.seconds.high * 2 / 3600 * 3.06)
    assert "from $0.3978 to the pay-as-you-go price of $3.06 an hour" in spot.price_from
    assert "evicted at any time, and the start-ups of their replacements are not in these figures" in spot.price_from
    assert "read 2024-09" in spot.price_from


def test_what_cannot_be_had_is_never_taken():
    table = table_of(prices=price_table().values(), tiers=BOTH)
    retired = explain_unavailable(price_of(V100), "dedicated", date(2026, 3, 1))
    assert retired == "retired on 2025-09-30"
    assert not {row.key[:2] for row in table.rows} & {
        (V100, "dedicated"), ("Standard_NC64as_T4_v3", "spot"), ("Standard_NC40ads_H100_v5", "spot"),
    }  # fmt: skip
    for day, there in ((29, True), (30, False)):
        assert (
            V100 in {row.price.sku for row in table_of(prices=[price_of(V100)], today=date(2025, 9, day)).rows}
        ) is there
    assert V100 in {
        row.price.sku
        for row in table_of(planned=planned_on(PRICES[V100], 2, kind="local"), prices=[price_of(V100)]).rows
    }, "nothing is bought"


def test_each_gpu_of_a_node_is_a_rank():
    asked: list[tuple[int, float]] = []

    @dataclass(frozen=True)
    class Listening(Amdahl):
        def seconds_at(self, node_count: int, speed: float = 1.0) -> Interval:
            asked.append((node_count, speed))
            return super().seconds_at(node_count, speed)

    quad = table_of(Listening(), prices=[PRICES[QUAD]], node_counts=(2,)).rows[0]
    assert asked == [(8, 2.0)], "eight ranks on GPUs of twice the speed"
    assert quad.seconds.expected == pytest.approx(0.1 * HOUR + 12 * HOUR / 2 / 8)
    assert quad.global_batch == 2 * 4 * 256
    # The baseline's own nodes have the ranks that they were given, whatever the SKU that stands in for their price has.
    asked.clear()
    two = planned_on(PRICES[T4], 2, ranks=2, batch=256)
    table = table_of(Listening(), planned=two, prices=[PRICES[T4], PRICES[A100]], node_counts=(3,))
    assert row_of(table, T4, 3).global_batch == 3 * 2 * 256
    assert asked[0] == (3, 1.0)
    assert asked[1] == (2, 6.0), "three ranks make two such nodes nearly; the speed of all of them stays"


def test_where_nothing_fits_the_cheapest_and_the_fastest_are_named() -> None:
    table = table_of(deadline=60.0, budget=1.0)
    [*_, said] = remedies(table, PLANNED, Amdahl())  # type: ignore[arg-type]
    cheapest, fastest = table.rows[0], min(table.rows, key=lambda row: row.seconds.expected)
    assert said.startswith(f"nearest come {cheapest.name}, up to {dollars(cheapest.usd.high)} and ")
    assert f" and {fastest.name}, up to " in said


ROWS = [replace(price, retired_on=None) for price in price_table().values()]
prices = st.lists(st.sampled_from(ROWS), min_size=1, max_size=6, unique_by=lambda price: price.sku)
limit = st.none() | st.floats(1, 1e6)
tables = st.fixed_dictionaries(
    {
        "prices": prices,
        "node_counts": st.sets(st.integers(1, 9), min_size=1),
        "tiers": st.sampled_from((("dedicated",), BOTH)),
        "deadline": limit,
        "budget": limit,
        "planned": st.builds(planned_on, st.sampled_from(ROWS), st.just(2), ranks=st.integers(1, 2)),
    }
)
forecasts = st.builds(Amdahl, fixed=st.floats(0, 1e4), computing=st.floats(1, 1e6), spread=st.floats(0, 0.5))


@given(forecasts, tables)
def test_what_holds_of_every_table(forecast: Amdahl, given: dict[str, Any]):
    table = table_of(forecast, **given)
    for row in table.rows:
        assert 0 <= row.usd.low <= row.usd.expected <= row.usd.high
    if table.cheapest:
        assert is_sure(table.cheapest, table.limits)
    else:
        assert not any(is_sure(row, table.limits) for row in table.rows)


def test_metadata_shows_the_planned_and_the_cheapest_row_and_is_json():
    whole = table_of(tiers=BOTH, deadline=5 * HOUR, budget=100.0)
    metadata = choices_metadata(whole)
    assert set(metadata) == {"choices", "all_choices"}
    assert len(metadata["all_choices"].data) == len(whole.rows)
    rows = [record.data for record in metadata["choices"].records]
    [cheapest] = [row for row in rows if "cheapest" in row["mark"]]
    [planned] = [row for row in rows if "this plan" in row["mark"]]
    assert (planned["choice"], cheapest["choice"]) == ("2 × NC6s_v3 (dedicated)", cheapest_of(whole).name)
    assert [row["usd"] for row in rows] == sorted(row["usd"] for row in rows)
    assert not choices_metadata(table_of(prices=[price_of(V100)]))
