"""A command that ends before its job is done says the state, what was paid, and the exact command that goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from told_events import told, write_run

from dtrain_dagster.cli.facts import JobFacts, LeftClock, read_course
from dtrain_dagster.cli.main import main
from dtrain_dagster.cli.start import command_again, describe_end, describe_outcome, this_command_again
from dtrain_dagster.clusters.base import JobState, JobStatus
from dtrain_dagster.jobs.totals import LaunchTotals
from trainer.rundir import RunDir

DTRAIN = str(Path(sys.executable).parent / "dtrain")
WORK = (sys.executable, "-m", "dtrain_dagster", "work")


@pytest.mark.parametrize(
    ("typed", "again"),
    [
        ("train --dataset latest --nodes 2", "dtrain train --name j --dataset 6f9b --nodes 2"),
        ("train --dataset=latest --name mine", "dtrain train --dataset=6f9b --name mine"),
        ("train --dataset walks --name=mine", "dtrain train --dataset walks --name=mine"),
        ("train --script a.py -- --name latest", "dtrain train --name j --script a.py -- --name latest"),
        ("launch -- python a.py --dataset latest", "dtrain launch --name j -- python a.py --dataset latest"),
    ],
)
def test_the_command_to_go_on_names_the_job_and_the_dataset(typed: str, again: str):
    assert command_again(typed.split(), "j", "6f9b") == again


def test_the_command_to_go_on_is_quoted_for_a_shell():
    assert command_again(["train", "--set", 'model.args={"a": 1}']) == "dtrain train --set 'model.args={\"a\": 1}'"
    assert command_again([]) == ""
    assert this_command_again("j") == "", "outside of a command"


def facts_of(state: JobState, rundir: RunDir, launches: int = 1) -> JobFacts:
    last = LaunchTotals(launches=1, seconds=10.0, node_hours=0.005, usd=0.01) if launches > 1 else None
    totals = LaunchTotals(launches=launches, seconds=60.0, node_hours=0.05, usd=0.153, last=last)
    return JobFacts(status=JobStatus(job_id="j", state=state), run_dir=rundir.uri, totals=totals)


def test_the_end_of_a_job_is_told_with_its_checkpoint_and_dollars(tmp_path: Path):
    rundir = write_run(tmp_path, "j", told(4), "cancelled")
    facts = facts_of(JobState.CANCELLED, rundir, launches=2)
    course = read_course(facts.status, rundir, LeftClock(rundir))
    assert describe_end(facts, course, ("g0001-s15", 15), "list price") == [
        "job j: cancelled at step 20/10000 of epoch 1; its checkpoint is of step 15",
        "so far: 1 min 00 s over 2 launches, of which the last took 10 s; 0.0500 node-hours (the last launch: 0.0050); "
        "$0.1530 (list price)",
    ]
    assert "it has no checkpoint yet" in describe_end(facts, course, None, "")[0]
    running = facts_of(JobState.RUNNING, rundir)
    assert (
        "checkpoint" not in describe_end(running, read_course(running.status, rundir, LeftClock(rundir)), None, "")[0]
    )


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "waits.py").write_text("import time; print('begun', flush=True); time.sleep(300)")
    own = {name: value for name, value in os.environ.items() if not name.startswith("DTRAIN_")}
    return own | {"DTRAIN_HOME": str(tmp_path / "home"), "DTRAIN_NODES": "1"}


def interrupted(folder: Path, env: dict[str, str], *words: str, when: str = "begun") -> tuple[int, str]:
    """Return the exit code and messages of a command that gets Ctrl-C once it, or its program, has printed this."""
    process = subprocess.Popen(
        words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout
    while when not in process.stdout.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    err = process.communicate(timeout=120)[1]
    return process.returncode, err


@pytest.mark.long
@pytest.mark.slow
def test_work_says_what_became_of_the_jobs_that_its_command_had_begun(tmp_path: Path, shell: dict[str, str]):
    """And of no other, whoever runs it meanwhile."""
    subprocess.run([DTRAIN, "launch", "--detach", "--name", "others", "waits.py"], cwd=tmp_path, env=shell, check=True)
    try:
        tell_of_work(tmp_path, shell)
    finally:
        CliRunner().invoke(main, ["cancel", "others"], env=shell)


def tell_of_work(tmp_path: Path, shell: dict[str, str]) -> None:
    inner = (DTRAIN, "launch", "--name", "inner", str(tmp_path / "waits.py"))
    code, err = interrupted(tmp_path, shell, *WORK, "--go-on-with", "make run", *inner)
    assert code == 130
    assert "job others" not in err
    told_by_work = err.partition("run it again: ")[2]
    assert re.search(
        r"^job inner: cancelled\nso far: \d+ s; 0\.\d+ node-hours; \$0\.\d+ \(stand-in price, nothing was billed\)\n"
        r"what was materialized is kept; only what is missing or has changed is made again\ngo on: make run\n\Z",
        told_by_work.partition("\n")[2],
        re.MULTILINE,
    ), err
    code, err = interrupted(tmp_path, shell, *WORK, "python", "waits.py")
    assert code == 130
    assert "no job was started\n" in err
    assert "job others" not in err
    assert err.endswith("go on: python -m dtrain_dagster work python waits.py\n")
    subprocess.run([DTRAIN, "launch", "--detach", "--name", "found", "waits.py"], cwd=tmp_path, env=shell, check=True)
    try:
        code, err = interrupted(tmp_path, shell, *WORK, DTRAIN, "logs", "--follow", "found")
        assert code == 130
        assert "no job was started\n" in err, "to look is no work"
    finally:
        CliRunner().invoke(main, ["cancel", "found"], env=shell)


@pytest.mark.slow
def test_who_stops_watching_is_told_that_the_job_goes_on(tmp_path: Path, shell: dict[str, str]):
    subprocess.run([DTRAIN, "launch", "--detach", "--name", "bg", "waits.py"], cwd=tmp_path, env=shell, check=True)
    try:
        code, err = interrupted(tmp_path, shell, DTRAIN, "logs", "--follow", "bg")
        assert code == 130
        assert re.search(r"^job bg: running\nso far: \d+ s; ", err)
        assert err.endswith("the job goes on; follow it: dtrain status bg --follow\nend it: dtrain cancel bg\n")
    finally:
        began = time.monotonic()
        said = CliRunner().invoke(main, ["cancel", "bg"], env=shell).output
    assert said == "job bg: cancelled\n"
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_ctrl_c_ends_any_command_with_its_code_and_no_trace(tmp_path: Path, shell: dict[str, str]):
    code, err = interrupted(tmp_path, shell, DTRAIN, "ui", "jobs", "--port", "0", when="http://")
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
