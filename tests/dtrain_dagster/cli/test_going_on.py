"""A command that ends before its job is done says the state, what was paid, and the exact command that goes on."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from shells import DTRAIN, Shell, shell_in
from told_events import told, write_run

from dtrain_dagster.cli.facts import describe_job, read_course
from dtrain_dagster.cli.start import describe_outcome, finish, this_command
from dtrain_dagster.clusters.base import JobState, JobStatus
from dtrain_dagster.jobs.facts import JobFacts
from dtrain_dagster.jobs.totals import LaunchTotals
from dtrain_dagster.settings.environment import load_settings
from trainer.rundir import RunDir

WORK = (sys.executable, "-m", "dtrain_dagster", "work")


def test_a_command_to_type_again_is_quoted_for_a_shell_and_names_what_it_began():
    typed = ["train", "--set", 'model.args={"a": 1}', "--", "--name", "x"]
    with click.Context(click.Command("train"), obj=typed):
        assert this_command() == "dtrain train --set 'model.args={\"a\": 1}' -- --name x"
        assert this_command("j").startswith("dtrain train --name j --set ")


@pytest.mark.parametrize(("ended", "more"), [("failed", ""), ("budget", " --set training.max_node_seconds=MORE")])
def test_a_job_that_its_budget_has_ended_goes_on_with_a_larger_one(tmp_path: Path, capsys, ended: str, more: str):
    rundir = write_run(tmp_path, "j", told(4), "failed")
    rundir.write_json("result.json", {"status": ended, "steps": 4, "error": "it stopped"})
    with pytest.raises(SystemExit):
        finish(load_settings(home=tmp_path), rundir, JobStatus(job_id="j", state=JobState.FAILED), "go on: dtrain")
    assert capsys.readouterr().err.endswith(f"go on: dtrain{more}\n")


def facts_of(state: JobState, rundir: RunDir, launches: int = 1) -> JobFacts:
    last = LaunchTotals(launches=1, seconds=10.0, node_hours=0.005, usd=0.01) if launches > 1 else None
    totals = LaunchTotals(launches=launches, seconds=60.0, node_hours=0.05, usd=0.153, last=last)
    return JobFacts(status=JobStatus(job_id="j", state=state), run_dir=rundir.uri, totals=totals)


def test_a_job_is_told_with_its_checkpoint_and_dollars(tmp_path: Path):
    rundir = write_run(tmp_path, "j", told(4), "cancelled")
    facts = facts_of(JobState.CANCELLED, rundir, launches=2)
    course = read_course(facts.status, rundir)
    *head, progress = describe_job(facts, course, ("g0001-s15", 15), "list price")
    assert head == [
        "job j: cancelled",
        "so far: 1 min 00 s over 2 launches, of which the last took 10 s; 0.0500 node-hours (the last launch: 0.0050); "
        "$0.1530 (list price)",
    ]
    assert progress.startswith("cancelled · step 20/10000 · epoch 1 · loss ")
    assert progress.endswith("; its checkpoint is of step 15")
    assert "it has no checkpoint yet" in describe_job(facts, course)[-1]
    running = facts_of(JobState.RUNNING, rundir)
    assert "checkpoint" not in describe_job(running, read_course(running.status, rundir))[-1]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "waits.py").write_text("import time; print('begun', flush=True); time.sleep(300)")
    with shell_in(tmp_path, DTRAIN_NODES="1") as made:
        yield made


@pytest.mark.long
@pytest.mark.slow
def test_work_says_what_became_of_the_jobs_that_its_command_had_begun(shell: Shell):
    """And of no other, whoever runs it meanwhile."""
    shell("launch", "--detach", "--name", "others", "waits.py")
    inner = (DTRAIN, "launch", "--name", "inner", str(shell.folder / "waits.py"))
    code, _, err = shell.interrupted("--go-on-with", "make run", *inner, program=WORK, when="begun")
    assert code == 130
    assert "job others" not in err
    told_by_work = err.partition("run it again: ")[2]
    assert re.search(
        r"^job inner: cancelled\nso far: \d+ s; 0\.\d+ node-hours; \$0\.\d+ \(stand-in price, nothing was billed\)\n"
        r"what was materialized is kept; only what is missing or has changed is made again\ngo on: make run\n\Z",
        told_by_work.partition("\n")[2],
        re.MULTILINE,
    ), err
    code, _, err = shell.interrupted("python", "waits.py", program=WORK, when="begun")
    assert code == 130
    assert "no job was started\n" in err
    assert "job others" not in err
    assert err.endswith("go on: python -m dtrain_dagster work python waits.py\n")
    code, _, err = shell.interrupted(DTRAIN, "logs", "--follow", "others", program=WORK, when="begun")
    assert code == 130
    assert "no job was started\n" in err, "to look is no work"
    shell("cancel", "others")


@pytest.mark.slow
def test_ctrl_c_ends_any_command_with_its_code_and_no_trace(shell: Shell):
    code, _, err = shell.interrupted("ui", "jobs", "--port", "0", when="http://")
    assert (code, err.splitlines()[-1]) == (130, "dtrain ui: ended by Ctrl-C")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", "job j cancelled"),
        ("cancelled", "job j cancelled"),
        ("rank 1 failed first", "job j cancelled: rank 1 failed first"),
    ],
)
def test_the_outcome_says_nothing_twice(message: str, said: str):
    assert describe_outcome(JobStatus(job_id="j", state=JobState.CANCELLED, message=message)) == said
