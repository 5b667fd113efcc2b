"""Ceilings as a person sets and meets them on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dtrain_dagster.cli.main import main

NEEDED = {"DTRAIN_OPTIONS": "command_tracking=off"}


def dtrain(home: Path, *words: str) -> Result:
    return CliRunner().invoke(main, words, env={**NEEDED, "DTRAIN_HOME": str(home)})


@pytest.mark.parametrize("amount", ["NaN", "-1", "0", "plenty", "inf"])
def test_what_is_no_amount_is_refused_by_the_name_of_the_option(tmp_path: Path, amount: str):
    done = dtrain(tmp_path, "cost", "ceilings", "--per-month", amount)
    assert done.exit_code == 2
    assert "--per-month" in done.output
    assert repr(amount) in done.output
    assert not (tmp_path / "ceilings.json").exists()


def test_the_ceiling_is_set_shown_lifted_and_set_again_where_it_cannot_be_read(tmp_path: Path):
    assert "no ceiling is set" in dtrain(tmp_path, "cost", "ceilings").output
    assert "$500.00 per month: $0.00 spent in " in dtrain(tmp_path, "cost", "ceilings", "--per-month", "500").output
    document = json.loads(dtrain(tmp_path, "cost", "ceilings", "--per-month", "400", "--json").output)
    assert document["per_month"] == 400.0
    (tmp_path / "ceilings.json").write_text("{")
    done = dtrain(tmp_path, "cost", "ceilings")
    assert "cannot be read, so nothing is started" in done.output
    assert "set it again by dtrain cost ceilings --per-month AMOUNT, or lift it by --none" in done.output
    assert "$300.00 per month" in dtrain(tmp_path, "cost", "ceilings", "--per-month", "300").output
    assert "--none lifts" in dtrain(tmp_path, "cost", "ceilings", "--none", "--per-month", "3").output
    assert "no ceiling is set" in dtrain(tmp_path, "cost", "ceilings", "--none").output


def test_options_of_ceilings_need_the_word(tmp_path: Path):
    done = dtrain(tmp_path, "cost", "--per-month", "5")
    assert done.exit_code == 2
    assert "--per-month is of ceilings" in done.output
    for name in ("ceilings", "latest"):
        assert "--refresh is of prices: leave out the name" in dtrain(tmp_path, "cost", name, "--refresh").output
