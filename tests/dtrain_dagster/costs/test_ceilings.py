"""Ceilings on spending: what a person gives, what is kept, and what a start is refused for."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain_dagster.costs.ceilings import (
    CEILINGS,
    CeilingError,
    Ceilings,
    Spending,
    explain_excess,
    month_of,
    read_ceilings,
    read_dollars,
    stands_of,
    write_ceilings,
)
from dtrain_dagster.costs.money import USD


def spending(name: str, **amounts: int) -> Spending:
    units = {f"{key}_units": value * USD for key, value in amounts.items()}
    return Spending(name=name, **units)


def refusal(ceilings: Ceilings, found: list[Spending], wanted: Spending) -> str | None:
    return explain_excess(stands_of(ceilings, found, wanted), found, "2026-11")


@pytest.mark.parametrize("text", ["NaN", "inf", "-3", "0", "many", "", "1e12", "0.0000000001", "1_0x"])
def test_what_is_no_amount_is_refused(text: str):
    with pytest.raises(ValueError, match=r"US dollars|decimal places"):
        read_dollars(text)


@given(st.decimals(min_value=Decimal("0.01"), max_value=10**9, places=2))
def test_an_amount_is_kept_to_the_cent(tmp_path_factory: pytest.TempPathFactory, amount: Decimal):
    home = tmp_path_factory.mktemp("home")
    write_ceilings(home, Ceilings(per_month=read_dollars(str(amount))))
    assert read_ceilings(home).per_month == amount
    assert read_ceilings(home).limits() == {"per_month": int(amount * 100) * (USD // 100)}


def test_ceilings_are_kept_lifted_and_added_to(tmp_path: Path):
    assert not read_ceilings(tmp_path)
    write_ceilings(tmp_path, Ceilings(per_month=Decimal(500)))
    write_ceilings(tmp_path, replace(read_ceilings(tmp_path), per_hour=Decimal("2.5")))
    assert read_ceilings(tmp_path) == Ceilings(per_month=Decimal(500), per_hour=Decimal("2.5"))
    write_ceilings(tmp_path, Ceilings())
    assert not (tmp_path / CEILINGS).exists()


@pytest.mark.parametrize("text", ["{", '{"per_month": -5}', '{"per_month": "NaN"}', '{"per_hour": "1e9"}', "[]"])
def test_ceilings_that_cannot_be_read_are_not_passed_over(tmp_path: Path, text: str):
    (tmp_path / CEILINGS).write_text(text)
    with pytest.raises(CeilingError, match="lift all ceilings by dtrain cost ceilings --none, and set"):
        read_ceilings(tmp_path)


def test_what_fits_to_the_cent_may_start_and_a_cent_more_may_not():
    found = [spending("a", month=300, promised=50), spending("b", month=100)]
    wanted = spending("c", promised=50)
    assert refusal(Ceilings(per_month=Decimal(500)), found, wanted) is None
    said = refusal(Ceilings(per_month=Decimal("499.99")), found, wanted)
    assert said == (
        "the ceiling of $499.99 per month: $400.00 spent in 2026-11, $50.00 promised to running jobs, and this start "
        "adds $50.00; most by a $350.00, b $100.00; start something smaller, wait for next month, or raise it: "
        "dtrain cost ceilings --per-month AMOUNT"
    )


def test_a_ceiling_that_is_not_known_is_not_passed_over(tmp_path: Path):
    (tmp_path / CEILINGS).write_text('{"per_month": "500", "per_person": "20"}')
    with pytest.raises(CeilingError, match=r"has per_person, which this version does not hold, .* --none"):
        read_ceilings(tmp_path)


def test_an_hour_costs_what_runs_now_and_the_start():
    found = [spending("a", hourly=6), spending("b", hourly=3), spending("over", month=10_000)]
    ceilings = Ceilings(per_hour=Decimal(12))
    assert refusal(ceilings, found, spending("c", hourly=3)) is None
    said = refusal(ceilings, found, spending("c", hourly=4))
    assert said is not None
    assert "running jobs cost $9.00 an hour, and this start adds $4.00; most by a $6.00, b $3.00" in said
    assert "wait until a job has ended" in said


def test_a_job_that_is_continued_is_promised_once():
    found = [spending("a", month=10, promised=90, hourly=5)]
    assert (
        refusal(Ceilings(per_month=Decimal(100), per_hour=Decimal(5)), found, spending("a", promised=90, hourly=5))
        is None
    )
    assert refusal(Ceilings(per_month=Decimal(100)), found, spending("b", promised=1)) is not None


def test_five_are_named_and_a_job_without_a_price_by_its_name():
    found = [spending(f"j{number}", month=number) for number in range(1, 8)]
    found.append(Spending(name="odd", unknown="no price of Standard_X"))
    said = refusal(Ceilings(per_month=Decimal(10)), found, spending("c", promised=1))
    assert said is not None
    assert (
        "most by j7 $7.00, j6 $6.00, j5 $5.00, j4 $4.00, j3 $3.00; not counted is odd: no price of Standard_X" in said
    )


def test_a_month_is_that_of_utc():
    assert month_of(1_798_761_600.0) == ("2027-01", 1_798_761_600.0)
    assert month_of(1_798_761_599.0) == ("2026-12", 1_796_083_200.0)
