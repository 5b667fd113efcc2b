"""`--json` prints one document, whose fields are those that its help and the reference tell."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields
from decimal import Decimal
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from price_list import listing, price_list
from told_home import JOBS, LONG, write_home
from told_json import TOLD, fields_in, printed

from dtrain_dagster.cli.common import print_json
from dtrain_dagster.cli.main import SECTIONS, load_command, main
from dtrain_dagster.costs.ceilings import write_ceiling
from dtrain_dagster.search.run import SearchPlan
from trainer.rundir import LOGS, RunDir

READS: list[tuple[str, str]] = [
    ("dtrain jobs", ""),
    ("dtrain jobs", "--fleets"),
    ("dtrain status", LONG),
    ("dtrain status", "train-6f66"),
    ("dtrain status", "weekend"),
    ("dtrain status", "--nodes"),
    ("dtrain logs", "nightly"),
    ("dtrain cost", "nightly"),
    ("dtrain cost", "week"),
    ("dtrain cost", ""),
    ("dtrain cost", "--sku Standard_NC6s_v3"),
    ("dtrain cost", "ceilings"),
    ("dtrain cost", "--refresh --sku Standard_NC6s_v3"),
    ("dtrain search", "--show latest"),
    ("dtrain data", "table.parquet --target price"),
    ("dtrain doctor", ""),
]
NOT_HERE = {
    "dtrain status": ("registered.", "nodes[].", "excluded_hosts[]."),
    "dtrain logs": ("time", "node", "text"),
    "dtrain cost": ("reconciliation", "causes.", "jobs.", "launches.last.", "not_counted."),
    "dtrain search": ("command", "plan"),
}
"""Words → how fields begin that this home does not have; those of logs are looked at below."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    write_home(tmp_path / "home")
    frame = {"price": [float(number) for number in range(40)], "size": [number % 7 for number in range(40)]}
    pd.DataFrame(frame).to_parquet(tmp_path / "table.parquet")
    write_ceiling(tmp_path / "home", Decimal(500))
    with price_list() as listed:
        listed.items = listing("Standard_NC6s_v3", 3.5)
        monkeypatch.setattr("dtrain_dagster.cli.cost.RETAIL_URL", listed.url)
        yield tmp_path


def test_each_command_that_lists_or_shows_has_a_document_and_a_test():
    names = [name for names in SECTIONS.values() for name in names]
    have = {f"dtrain {name}" for name in names if any("--json" in each.opts for each in load_command(name).params)}
    assert {words for words, _ in READS} == TOLD.keys() == have


@pytest.mark.parametrize("words", TOLD)
def test_each_field_that_is_printed_is_told_and_each_that_is_told_is_printed(home: Path, words: str):
    found = fields_in(words, [printed(words, arguments) for own, arguments in READS if own == words])
    left_out = {name for name in TOLD[words] if name.startswith(NOT_HERE.get(words, ("-",)))}
    assert found | left_out == set(TOLD[words])


def test_the_plan_of_a_search_is_told():
    assert {f"plan.{each.name}" for each in fields(SearchPlan)} <= set(TOLD["dtrain search"])


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


@pytest.mark.parametrize("cluster", ["azure_ml", "slurm"])
def test_a_cluster_that_cannot_be_used_is_an_answer(home: Path, monkeypatch: pytest.MonkeyPatch, cluster: str):
    monkeypatch.setenv("DTRAIN_CLUSTER", cluster)
    answer = printed("dtrain doctor", code=1)
    assert fields_in("dtrain doctor", [answer]) - set(TOLD["dtrain doctor"]) == set()
    [line] = answer["lines"]
    assert line["verdict"] == "missing"
    person = CliRunner().invoke(main, ["doctor"])
    assert (person.exit_code, line["seen"] in person.stdout) == (1, True)


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
    assert printed("dtrain status", "train-6f66")["usd"] == pytest.approx(ended["usd"], abs=0.05)
