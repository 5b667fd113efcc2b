"""`dtrain` on an emulated workspace: jobs that one shell starts are seen and ended from another."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.small_job import write_dataset
from tests.azure.shell import JOBS, Shell
from trainer.rundir import RunDir

pytestmark = pytest.mark.long  # each time: the commands in cli/test_main.py, such jobs in test_manager.py


def test_jobs_of_the_cloud_are_started_seen_and_cancelled_from_shells(shell: Shell, tmp_path: Path) -> None:
    write_dataset(tmp_path / "home" / "storage" / "datasets" / "walks")
    few = ("--dataset", "latest", "--nodes", "2", "--model", "my_model:make", "--set", "training.log_frequency=1")
    assert shell("jobs").startswith(f"no jobs in {JOBS} yet;")
    assert "there is no script 'train.py'" in shell("launch", "train.py", code=2)
    assert "no job 'first': there are no jobs yet" in shell("cancel", "first", code=2)

    first = shell.start("train", *few, "--name", "first", "--set", "training.max_steps=4")
    out, err = first.communicate(timeout=120)
    assert first.returncode == 0, out + err
    assert "job first: 2 nodes\nhttps://" in err
    assert "step 4/4" in out
    assert "4 steps on 2 ranks" in out
    long = (*few, "--name", "second", "--epochs", "999", "--set", 'model.args={"pause": 0.3}')
    second = shell.start("train", *long)
    assert RunDir(f"{JOBS}/first").read_job().dataset.uri.startswith("az://dtrain/team/datasets/")
    said = shell("status", "first")
    assert "job first: succeeded" in said
    assert "https://" in said
    assert "4 steps on 2 ranks" in shell("status", "first")
    [line] = shell("logs", "first", "--node", "1", "--tail", "1").splitlines()
    assert line
    assert shell("logs", "first").count("a model of my own") == 2
    assert "has succeeded already" in shell("train", *few, "--name", "first", code=2)

    job = RunDir(f"{JOBS}/second")
    _wait(lambda: list(job.events("step")), second)
    rows = [line.split()[:3] for line in shell("jobs").splitlines()]
    assert rows == [["JOB", "STATE", "NODES"], ["second", "running", "2"], ["first", "succeeded", "2"]]
    said = shell("doctor", code=1)
    assert "cluster dtrain: healthy" in said
    assert said.count("works on second-l1") == 2
    said = "job second is already running, so no new one is started\nsecond\nfollow it: dtrain status second --follow\n"
    assert shell("train", *long, "--detach").endswith(said)
    follower = shell.start("logs", "--follow", "second", "--node", "0")
    assert follower.stdout
    assert follower.stdout.readline() == "[node 0] --- launch 1, second-l1 ---\n"
    assert follower.stdout.readline() == "[node 0] a model of my own\n"
    assert shell("cancel", "second") == "job second: cancelled\n"
    out, err = second.communicate(timeout=60)
    assert second.returncode == 143, out + err
    assert "job second cancelled" in err
    assert follower.wait(60) == 0
    assert shell.cloud.control("state")["jobs"]["second-l1"]["status"] == "Canceled"
    assert set(shell.cloud.control("bought")["jobs"]) == {"first-l1", "second-l1"}
    [log] = (tmp_path / "home" / "audit").iterdir()
    audit = [json.loads(line) for line in log.read_text().splitlines()]
    done = [(line["operation"], line["target"]) for line in audit if line["operation"].startswith("job.")]
    assert done[:2] == [("job.submit", "first-l1"), ("job.submit", "second-l1")]
    # Asked for by the shell that cancels, and now and then by the one that tends the job, which sees it end.
    assert set(done[2:]) == {("job.cancel", "second-l1")}
    assert {line["who"] for line in audit} == {f"{getpass.getuser()}@{socket.gethostname()}"}


def _wait(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)


PROGRAM = """
import os, sys
from helper import WORDS

print(WORDS, "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:], flush=True)
sys.exit(int(sys.argv[1]))
"""


def test_a_program_goes_along_with_what_it_imports_and_is_paid_for(shell: Shell) -> None:
    (shell.folder / "program.py").write_text(PROGRAM)
    (shell.folder / "helper.py").write_text("WORDS = 'a program of my own'\n")
    assert "must be a Python script on this machine" in shell("launch", "--", "bash", "run.sh", code=2)

    done = shell.start("launch", "--nodes", "2", "--name", "own", "program.py", "0")
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, out + err
    assert "must be in the image" in err
    for rank in (0, 1):
        assert f"a program of my own rank {rank} of 2 0" in shell("logs", "own")
    assert "job own: succeeded" in shell("status", "own")
    nodes = RunDir(f"{JOBS}/own").nodes()
    assert sorted((node.node_id, node.exit_codes) for node in nodes) == [(0, (0,)), (1, (0,))]
    assert json.loads(shell("cost", "own", "--json"))["total_usd"] > 0

    failed = shell.start("launch", "--nodes", "1", "--name", "bad", "program.py", "7")
    out, err = failed.communicate(timeout=120)
    assert failed.returncode != 0, out + err
    assert "job bad: failed" in shell("status", "bad")
    assert [node.exit_codes for node in RunDir(f"{JOBS}/bad").nodes()] == [(7,)]
