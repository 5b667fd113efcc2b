"""Ceilings on spending: what a person gives, what is kept, and what a start is refused for."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain_dagster.costs.ceilings import (
    CEILINGS,
    CeilingError,
    Spending,
    month_of,
    read_ceiling,
    read_dollars,
    stand_of,
    write_ceiling,
)
from dtrain_dagster.costs.money import USD


def spending(name: str, **amounts: int) -> Spending:
    units = {f"{key}_units": value * USD for key, value in amounts.items()}
    return Spending(name=name, **units)


def refusal(per_month: str, found: list[Spending], wanted: Spending) -> str | None:
    return stand_of(Decimal(per_month), "2026-11", found, wanted).refusal


@pytest.mark.parametrize("text", ["NaN", "inf", "-3", "0", "many", "", "1e12", "0.0000000001", "1_0x"])
def test_what_is_no_amount_is_refused(text: str):
    with pytest.raises(ValueError, match=r"US dollars|decimal places"):
        read_dollars(text)


@given(st.decimals(min_value=Decimal("0.01"), max_value=10**9, places=2))
def test_an_amount_is_kept_to_the_cent(tmp_path_factory: pytest.TempPathFactory, amount: Decimal):
    home = tmp_path_factory.mktemp("home")
    write_ceiling(home, read_dollars(str(amount)))
    found = read_ceiling(home)
    assert found == amount
    assert stand_of(found, "2026-11", []).limit == int(amount * 100) * (USD // 100)
    write_ceiling(home, None)
    assert read_ceiling(home) is None
    assert not (home / CEILINGS).exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, "cannot be read") for text in ("{", '{"per_month": -5}', '{"per_month": "NaN"}', "[]")),
        ('{"per_month": "500", "per_hour": "20"}', "has per_hour, which this version does not hold"),
    ],
)
def test_a_ceiling_that_cannot_be_read_or_is_not_known_is_not_passed_over(tmp_path: Path, text: str, why: str):
    (tmp_path / CEILINGS).write_text(text)
    with pytest.raises(CeilingError, match=f"{why}.* nothing is started: .*dtrain cost ceilings --per-month AMOUNT"):
        read_ceiling(tmp_path)


def test_what_fits_to_the_cent_may_start_and_a_cent_more_may_not():
    found = [spending("a", month=300, promised=50), spending("b", month=100)]
    wanted = spending("c", promised=50)
    assert refusal("500", found, wanted) is None
    said = refusal("499.99", found, wanted)
    assert said == (
        "the ceiling of $499.99 per month: $400.00 spent in 2026-11, $50.00 promised to running jobs, and this start "
        "adds $50.00; most by a $350.00, b $100.00; start something smaller, wait for next month, or raise it: "
        "dtrain cost ceilings --per-month AMOUNT"
    )


def test_a_job_that_is_continued_is_promised_once():
    found = [spending("a", month=10, promised=90)]
    assert refusal("100", found, spending("a", promised=90)) is None
    assert refusal("100", found, spending("b", promised=1)) is not None


def test_five_are_named_and_a_job_without_a_price_by_its_name():
    found = [spending(f"j{number}", month=number) for number in range(1, 8)]
    found.append(Spending(name="odd", unknown="no price of Standard_X"))
    said = refusal("10", found, spending("c", promised=1))
    assert said is not None
    assert (
        "most by j7 $7.00, j6 $6.00, j5 $5.00, j4 $4.00, j3 $3.00; not counted is odd: no price of Standard_X" in said
    )


def test_a_month_is_that_of_utc():
    assert month_of(1_798_761_600.0) == ("2027-01", 1_798_761_600.0)
    assert month_of(1_798_761_599.0) == ("2026-12", 1_796_083_200.0)
