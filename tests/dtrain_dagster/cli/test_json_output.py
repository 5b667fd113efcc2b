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
from told_json import TOLD, fields_in
from told_json import printed as printed_by

from dtrain_dagster.cli.json_output import print_json
from dtrain_dagster.cli.main import main
from dtrain_dagster.cli.reference import walk_commands
from trainer.rundir import LOGS, RunDir

ELSEWHERE = {"dtrain search", "dtrain prices refresh", "dtrain endpoint check"}
"""Commands that train, or ask a service: `test_json_of_trainings.py`."""
ON_SLURM = {"dtrain slurm account"}
"""A command that needs an accounting: `tests/engines/test_slurm_accounting.py`."""
READS: list[tuple[str, str]] = [
    ("dtrain jobs", ""),
    ("dtrain status", LONG),
    ("dtrain status", ""),
    ("dtrain logs", "nightly"),
    ("dtrain summary", "train-6f66"),
    ("dtrain cost", "nightly"),
    ("dtrain searches", ""),
    ("dtrain searches", "latest"),
    ("dtrain fleet status", "weekend"),
    ("dtrain fleet status", ""),
    ("dtrain fleet cost", "week"),
    ("dtrain prices list", ""),
    ("dtrain prices show", "Standard_NC6s_v3"),
    ("dtrain azure doctor", ""),
    ("dtrain data rows", "table.parquet --target price"),
    ("dtrain slurm check", ""),
    ("dtrain kubernetes check", ""),
    ("dtrain ray check", ""),
]
CODES = {"dtrain azure doctor": 1, "dtrain slurm check": 2, "dtrain kubernetes check": 2, "dtrain ray check": 2}
"""Without a subscription and without clusters."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    write_home(tmp_path / "home")
    frame = {"price": [float(number) for number in range(40)], "size": [number % 7 for number in range(40)]}
    pd.DataFrame(frame).to_parquet(tmp_path / "table.parquet")
    return tmp_path


def printed(words: str, arguments: str = "") -> Any:
    return printed_by(words, arguments, CODES.get(words, 0))


def test_each_command_that_lists_or_shows_has_a_document_and_a_test():
    assert {words for words, _ in READS} | ELSEWHERE | ON_SLURM == TOLD.keys()
    shows = {"jobs", "status", "cost", "summary", "searches", "list", "show", "doctor", "check", "logs"}
    for words, command in walk_commands():
        if words.rpartition(" ")[2] in shows and not isinstance(command, click.Group):
            assert words in TOLD, f"{words} has no --json"


@pytest.mark.parametrize(("words", "arguments"), READS)
def test_each_field_that_is_printed_is_told(home: Path, words: str, arguments: str):
    assert fields_in(words, [printed(words, arguments)]) - set(TOLD[words]) == set()


def test_lines_of_logs_have_node_and_time(home: Path):
    rundir = RunDir(str(home / "home" / "storage" / "jobs" / "night"))
    for node, lines in enumerate((["2026-11-26 14:25:01,25 a", "b \x1b[31m"], ["c"])):
        rundir.storage.write(f"{LOGS}/node-{node}.log", "\n".join(lines).encode())
    rows = [
        {"time": "2026-11-26 14:25:01.250000", "node": 0, "text": "2026-11-26 14:25:01,25 a"},
        {"time": None, "node": 0, "text": "b \x1b[31m"},
        {"time": None, "node": 1, "text": "c"},
    ]
    assert printed("dtrain logs", "night") == printed("dtrain logs", "night --follow") == rows
    assert printed("dtrain logs", "night --tail 1") == rows[1:]
    assert printed("dtrain logs", "night --node 1") == rows[2:]
    refused = CliRunner().invoke(main, ["logs", "night", "--node", "2", "--json"])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "has no log of a node 2" in refused.stderr


def test_a_cluster_that_cannot_be_used_is_an_answer_for_a_program_and_an_error_for_a_person(home: Path):
    answer = printed("dtrain slurm check")
    assert (answer["usable"], answer["version"]) == (False, None)
    person = CliRunner().invoke(main, ["slurm", "check"])
    assert (person.exit_code, person.stdout) == (2, "")
    assert answer["message"] in person.stderr


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
