"""Ceilings as a person sets and meets them on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dtrain_dagster.cli.main import main
from harness.small_job import write_dataset

NEEDED = {"DTRAIN_COMMAND_TRACKING": "off"}


def dtrain(home: Path, *words: str) -> Result:
    return CliRunner().invoke(main, words, env={**NEEDED, "DTRAIN_HOME": str(home)})


@pytest.mark.parametrize("amount", ["NaN", "-1", "0", "plenty", "inf"])
def test_what_is_no_amount_is_refused_by_the_name_of_the_option(tmp_path: Path, amount: str):
    done = dtrain(tmp_path, "cost", "ceilings", "--per-person", amount)
    assert done.exit_code == 2
    assert "--per-person" in done.output
    assert repr(amount) in done.output
    assert not (tmp_path / "ceilings.json").exists()


def test_ceilings_are_set_shown_and_lifted(tmp_path: Path):
    assert "no ceiling is set" in dtrain(tmp_path, "cost", "ceilings").output
    shown = dtrain(tmp_path, "cost", "ceilings", "--per-month", "500", "--per-hour", "12.5").output
    assert "per month" in shown
    assert "$500.00" in shown
    document = json.loads(dtrain(tmp_path, "cost", "ceilings", "--per-month", "400", "--json").output)
    assert document["ceilings"] == {"per_hour": 12.5, "per_month": 400.0, "per_person": None, "per_project": None}
    assert "lifts all ceilings" in dtrain(tmp_path, "cost", "ceilings", "--none", "--per-hour", "3").output
    assert "no ceiling is set" in dtrain(tmp_path, "cost", "ceilings", "--none").output


def test_options_of_ceilings_need_the_word(tmp_path: Path):
    done = dtrain(tmp_path, "cost", "--per-month", "5")
    assert done.exit_code == 2
    assert "--per-month is of ceilings" in done.output
    assert "--refresh is of prices" in dtrain(tmp_path, "cost", "ceilings", "--refresh").output


@pytest.mark.slow
def test_a_training_is_counted_and_the_next_one_refused(tmp_path: Path):
    write_dataset(tmp_path / "walks")
    words = ("train", "--dataset", str(tmp_path / "walks"), "--nodes", "2", "--epochs", "1", "--name")
    assert dtrain(tmp_path / "home", *words, "one").exit_code == 0
    dtrain(tmp_path / "home", "cost", "ceilings", "--per-month", "0.000001")
    refused = dtrain(tmp_path / "home", *words, "two")
    assert refused.exit_code == 2
    assert "the ceiling of $0.0000 per month" in refused.output
    assert "raise it: dtrain cost ceilings --per-month AMOUNT" in refused.output
    assert [path.name for path in (tmp_path / "home" / "storage" / "jobs").iterdir()] == ["one"]
    assert not list((tmp_path / "home" / "spending").glob("two*")), "nothing is promised"
    document = json.loads(dtrain(tmp_path / "home", "cost", "ceilings", "--json").output)
    bill = json.loads(dtrain(tmp_path / "home", "cost", "one", "--json").output)
    assert document["stands"][0]["spent_usd"] == pytest.approx(bill["metrics"]["total_cost_usd"])
