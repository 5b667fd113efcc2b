"""Ceilings as a person sets and meets them on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dtrain_dagster.cli.main import main

NEEDED = {"DTRAIN_COMMAND_TRACKING": "off"}


def dtrain(home: Path, *words: str) -> Result:
    return CliRunner().invoke(main, words, env={**NEEDED, "DTRAIN_HOME": str(home)})


@pytest.mark.parametrize("amount", ["NaN", "-1", "0", "plenty", "inf"])
def test_what_is_no_amount_is_refused_by_the_name_of_the_option(tmp_path: Path, amount: str):
    done = dtrain(tmp_path, "cost", "ceilings", "--per-month", amount)
    assert done.exit_code == 2
    assert "--per-month" in done.output
    assert repr(amount) in done.output
    assert not (tmp_path / "ceilings.json").exists()


def test_ceilings_are_set_shown_and_lifted(tmp_path: Path):
    assert "no ceiling is set" in dtrain(tmp_path, "cost", "ceilings").output
    shown = dtrain(tmp_path, "cost", "ceilings", "--per-month", "500", "--per-hour", "12.5").output
    assert "per month" in shown
    assert "$500.00" in shown
    document = json.loads(dtrain(tmp_path, "cost", "ceilings", "--per-month", "400", "--json").output)
    assert document["ceilings"] == {"per_hour": 12.5, "per_month": 400.0}
    assert "lifts all ceilings" in dtrain(tmp_path, "cost", "ceilings", "--none", "--per-hour", "3").output
    assert "no ceiling is set" in dtrain(tmp_path, "cost", "ceilings", "--none").output


def test_options_of_ceilings_need_the_word(tmp_path: Path):
    done = dtrain(tmp_path, "cost", "--per-month", "5")
    assert done.exit_code == 2
    assert "--per-month is of ceilings" in done.output
    for name in ("ceilings", "latest"):
        assert "--refresh is of prices: leave out the name" in dtrain(tmp_path, "cost", name, "--refresh").output


def test_ceilings_that_cannot_be_read_are_mended_as_the_message_says(tmp_path: Path):
    dtrain(tmp_path, "cost", "ceilings", "--per-month", "500")
    (tmp_path / "ceilings.json").write_text("{")
    done = dtrain(tmp_path, "cost", "ceilings", "--per-month", "500")
    assert "cannot be read, so nothing is started" in done.output
    assert "lift all ceilings by dtrain cost ceilings --none, and set --per-month AMOUNT" in done.output
    assert dtrain(tmp_path, "cost", "ceilings", "--none").exit_code == 0
    assert dtrain(tmp_path, "cost", "ceilings", "--per-month", "500").exit_code == 0
