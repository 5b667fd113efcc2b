"""`--json` prints one document, whose fields are those that its help and the reference tell."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click
import pandas as pd
import pytest
from click.testing import CliRunner
from told_home import JOBS, LONG, write_home

from dtrain_dagster.cli.json_output import JsonOption, fields_of, print_json
from dtrain_dagster.cli.main import main
from dtrain_dagster.cli.reference import walk_commands

TOLD = {
    words: option.fields
    for words, command in walk_commands()
    for option in command.params
    if isinstance(option, JsonOption)
}
"""Words of a command → the fields that it documents."""
ELSEWHERE = {"dtrain search", "dtrain prices refresh", "dtrain slurm account", "dtrain endpoint check"}
"""Commands that train, or ask a service."""
READS: list[tuple[str, str]] = [
    ("dtrain jobs", ""),
    ("dtrain status", LONG),
    ("dtrain status", ""),
    ("dtrain summary", "train-6f66"),
    ("dtrain cost", "nightly"),
    ("dtrain searches", ""),
    ("dtrain searches", "latest"),
    ("dtrain fleet status", "weekend"),
    ("dtrain fleet cost", "week"),
    ("dtrain prices list", ""),
    ("dtrain prices show", "Standard_NC6s_v3"),
    ("dtrain azure doctor", ""),
    ("dtrain data rows", "table.parquet --target price"),
    ("dtrain data tokens", "texts --context 8"),
]
FREE = {"metrics", "energy", "launches", "periods", "presence", "reconciliation", "plan", "values", "planned"}
"""Fields whose own names are data, or depend on the job."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    write_home(tmp_path / "home")
    frame = {"price": [float(number) for number in range(40)], "size": [number % 7 for number in range(40)]}
    pd.DataFrame(frame).to_parquet(tmp_path / "table.parquet")
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text("the same words, again and again. " * 30)
    return tmp_path


def printed(words: str, arguments: str = "") -> Any:
    done = CliRunner().invoke(main, [*words.split()[1:], *arguments.split(), "--json"])
    assert done.exit_code == (1 if words == "dtrain azure doctor" else 0), done.output
    return json.loads(done.stdout)


def test_each_command_that_lists_or_shows_has_a_document_and_a_test():
    assert {words for words, _ in READS} | ELSEWHERE == TOLD.keys()
    shows = {"jobs", "status", "cost", "summary", "searches", "list", "show", "doctor"}
    for words, command in walk_commands():
        if words.rpartition(" ")[2] in shows and not isinstance(command, click.Group):
            assert words in TOLD, f"{words} has no --json"


@pytest.mark.parametrize(("words", "arguments"), READS)
def test_the_fields_are_those_that_are_told(home: Path, words: str, arguments: str):
    found, told = fields_of(printed(words, arguments)), set(TOLD[words])
    undocumented = {name for name in found if name not in told and name.removeprefix("[].").split(".")[0] not in FREE}
    undocumented = {name for name in undocumented if not name.endswith("[]")}
    assert {name for name in undocumented if name not in told} == set(), words
    for name in told:
        if words == "dtrain fleet status" or "[]" not in name.removeprefix("[]."):
            continue
        parent = name.removeprefix("[].").split("[]")[0]
        if any(each.startswith(f"{parent}[]") for each in found):
            assert name in found, f"{words}: {name} is told and not there"


def test_what_is_not_known_is_null_and_never_a_word_that_json_does_not_have(capsys: pytest.CaptureFixture[str]):
    print_json({"a": math.nan, "b": [math.inf, 1.0], "c": {"d": -math.inf}, "e": (1, 2)})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.0], "c": {"d": None}, "e": [1, 2]}


def test_a_damaged_job_is_said_to_be_damaged_and_hides_no_other(home: Path):
    (home / "home" / "storage" / "jobs" / "night" / "launch.json").write_text("{")
    states = {row["job"]: row["state"] for row in printed("dtrain jobs")}
    assert states == {**JOBS, "night": "damaged"}
    one = printed("dtrain status", "night")
    assert (one["state"], one["presences"]) == ("damaged", [])
    assert "launch.json" in one["message"]
    shown = CliRunner().invoke(main, ["jobs"]).output
    assert "! night is damaged: " in shown
    refused = CliRunner().invoke(main, ["status", "night"])
    assert (refused.exit_code, "launch.json" in refused.output) == (2, True), refused.output


def test_jobs_say_the_same_in_the_list_and_by_themselves(home: Path):
    listed = {row["job"]: row for row in printed("dtrain jobs")}
    assert {name: row["state"] for name, row in listed.items()} == JOBS
    for name, row in listed.items():
        one = printed("dtrain status", name)
        assert row == {key: one[key] for key in row}
    ended = listed[LONG]
    assert ended["seconds"] == pytest.approx(3600, abs=5)
    assert ended["node_hours"] == pytest.approx(3.0, abs=0.01)
    assert ended["usd"] == pytest.approx(3 * 3.06, abs=0.05)
    assert printed("dtrain cost", LONG)["training_usd"] == pytest.approx(ended["usd"], abs=1e-5)
    assert printed("dtrain summary", "train-6f66")["usd"] == pytest.approx(ended["usd"], abs=0.05)
