"""A job is named by its name, by the beginning of it, or as latest, in every command; and a shell completes it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from told_home import JOBS, LONG, write_home

from dtrain_dagster.cli.common import Refusal
from dtrain_dagster.cli.job_names import resolve_name
from dtrain_dagster.cli.main import main

DTRAIN = str(Path(sys.executable).parent / "dtrain")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    write_home(tmp_path / "home")
    return tmp_path / "home"


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == code, done.output
    return done.output


def refusal(given: str, *names: str) -> str:
    with pytest.raises(Refusal) as caught:
        resolve_name(given, names, "job", "dtrain jobs")
    return caught.value.message


def test_names_and_beginnings_are_found():
    names = ("night", "nightly", "train-1")
    assert resolve_name("night", names, "job", "") == "night", "a whole name is itself, whatever else begins with it"
    assert resolve_name("nightl", names, "job", "") == "nightly"
    assert resolve_name("t", names, "job", "") == "train-1"


def test_a_name_that_is_not_there_or_not_clear_lists_the_candidates():
    assert refusal("nigh", "night", "nightly", "x") == ("'nigh' begins 2 names: night, nightly; give more of the name")
    many = [f"trial-{number:04d}" for number in range(9)]
    assert refusal("trial", *many).endswith("trial-0005 and 3 more; give more of the name")
    assert refusal("nihgt", "night", "x") == "no job 'nihgt'; did you mean night? (`dtrain jobs` lists them)"
    assert refusal("zzz", "a", "b") == "no job 'zzz'; there are a, b (`dtrain jobs` lists them)"
    assert refusal("a") == "no job 'a': there is none yet; `dtrain jobs` lists them"
    assert refusal("", "a", "b").startswith("no job ''")


def test_every_command_that_takes_a_job_takes_a_beginning(home: Path):
    more = (["status", "--follow"], ["status", "--html", "a.html"], ["status", "--trace"])
    for words in (["status"], ["logs"], ["cost"], ["cancel"], *more):
        assert "'nigh' begins 2 names: night, nightly" in run(*words, "nigh", code=2), words
    assert "job night: cancelled" in run("status", "night"), "a whole name is itself"
    assert f"job {LONG}: failed" in run("status", "search")
    assert "no job 'nightmare'; did you mean night" in run("logs", "nightmare", code=2)
    assert "fleet weekend: " in run("status", "week"), "of a fleet and its jobs the fleet is meant"
    assert "no job 'wekend'; did you mean weekend?" in run("cost", "wekend", code=2)
    assert "trial 1" in run("search", "--show", "w")


def test_latest_is_the_first_of_the_list(home: Path):
    first = json.loads(run("jobs", "--json"))[0]["job"]
    assert json.loads(run("status", "latest", "--json"))["job"] == first


def test_a_program_is_no_training(home: Path):
    (home / "storage" / "jobs" / "night" / "job.json").unlink()
    assert "job night is not a training, but a program of `dtrain launch`" in run("status", "night", "--follow", code=2)


def test_a_wrong_setting_completes_nothing_and_says_nothing(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DTRAIN_NODES", "many")
    asked = {"_DTRAIN_COMPLETE": "zsh_complete", "COMP_WORDS": "dtrain status nig", "COMP_CWORD": "2"}
    done = CliRunner().invoke(main, [], prog_name="dtrain", env=asked, complete_var="_DTRAIN_COMPLETE")
    assert (done.exit_code, done.output.strip()) == (0, "")


def test_commands_options_jobs_and_datasets_are_offered(home: Path):
    (home / "storage" / "datasets" / "6f9b3c").mkdir(parents=True)
    complete = ShellComplete(main, {}, "dtrain", "_DTRAIN_COMPLETE")

    def offered(*words: str) -> set[str]:
        return {item.value for item in complete.get_completions(list(words[:-1]), words[-1])}

    assert offered("l") == {"launch", "logs"}
    assert offered("status", "nig") == {"night", "nightly"}
    assert offered("status", "lat") == {"latest"}
    assert offered("status", "") >= {"latest", *JOBS}
    assert "--follow" in offered("logs", "--f")
    assert offered("train", "--dataset", "6f") == {"6f9b3c"}
    assert offered("cost", "w") == {"weekend"}
    [file] = complete.get_completions(["train", "--dataset"], "jo")
    assert (file.type, file.value) == ("file", "jo"), "no dataset: the shell looks among files"
