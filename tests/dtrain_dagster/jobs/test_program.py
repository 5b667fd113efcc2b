"""The job of a program: its command on the nodes, and what is refused before there are nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest

from dtrain_dagster.jobs.program import (
    command_on_nodes,
    explain_refusal,
    processes_of,
    refuse_program,
    start_command,
)
from dtrain_dagster.jobs.script_job import explain_end
from dtrain_dagster.settings.cluster_kinds import KINDS
from trainer.config import ConfigError
from trainer.frameworks.catalogue import FRAMEWORKS


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("engine", sorted(FRAMEWORKS))
def test_only_pairs_that_make_sense_are_accepted(kind: str, engine: str):
    said = explain_refusal(engine, KINDS[kind], 1, has_gpus=True)
    assert bool(said) == ((kind, engine) == ("ray", "ray")), said
    if said:
        assert f"DTRAIN_CLUSTER={kind}" in said
    several = explain_refusal(engine, KINDS["slurm"], 4, has_gpus=True)
    assert ("--procs-per-node" in several) == (engine in ("ray", "tensorflow"))


def test_one_process_takes_all_gpus_of_a_node_where_the_framework_has_it_so():
    assert processes_of("horovod", None, 4) == processes_of("torchrun", None, 4) == 4
    assert processes_of("tensorflow", None, 4) == processes_of("ray", None, 4) == 1
    assert processes_of("tensorflow", 2, 4) == 2


def test_an_engine_that_is_none_is_refused_and_so_is_one_that_is_missing(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="there is no engine 'mpi'; choose one of torchrun, horovod"):
        refuse_program("mpi", KINDS["local"], 1, has_gpus=False)
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(ConfigError, match="--engine horovod needs the package horovod"):
        refuse_program("horovod", KINDS["local"], 1, has_gpus=False)
    refuse_program("horovod", KINDS["slurm"], 1, has_gpus=False)  # what its nodes have is not known here
    refuse_program("torchrun", KINDS["local"], 4, has_gpus=True)


def test_on_other_machines_a_script_goes_by_its_path_and_their_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("s.py").touch()
    here = str(tmp_path / "s.py")
    wanted = ("/opt/python3", here, "--epochs", "3"), ""
    assert command_on_nodes(["s.py", "--epochs", "3"], "/opt/python3") == wanted
    assert command_on_nodes(["python", "s.py", "--epochs", "3"], "/opt/python3") == wanted
    assert command_on_nodes([sys.executable, "s.py", "--epochs", "3"], "/opt/python3") == wanted
    assert command_on_nodes(["/usr/bin/python3.9", here], "/opt/python3") == (("/usr/bin/python3.9", here), "")
    assert command_on_nodes(["/image/s.py"], "/opt/python3") == (("/opt/python3", "/image/s.py"), "")
    assert command_on_nodes(["python", "-m", "pack"], "/opt/python3") == (("/opt/python3", "-m", "pack"), "")
    with pytest.raises(ConfigError, match=f"no script 'other.py' in {tmp_path}"):
        command_on_nodes(["other.py"], "/opt/python3")


def test_where_code_is_sent_the_script_goes_along_and_is_run_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("below").mkdir()
    Path("below/s.py").touch()
    found = command_on_nodes(["python", "below/s.py", "-x"], "/opt/python3", goes_along=True)
    assert found == (("/opt/python3", "s.py", "-x"), str(tmp_path / "below" / "s.py"))
    with pytest.raises(ConfigError, match=r"no script '/image/s\.py'"):
        command_on_nodes(["/image/s.py"], "/opt/python3", goes_along=True)
    with pytest.raises(ConfigError, match="must be a Python script on this machine"):
        command_on_nodes(["bash", "run.sh"], "/opt/python3", goes_along=True)


def test_the_starter_comes_first_but_for_plain_scripts_of_this_machine():
    command = ("python", "s.py")
    assert start_command("torchrun", command, "py", KINDS["local"]) == command
    assert start_command("torchrun", command, "py", KINDS["slurm"])[-5:] == ("--engine", "torchrun", "--", *command)
    started = start_command("ray", command, "py", KINDS["local"])
    assert started == ("py", "-P", "-m", "trainer.frameworks", "--engine", "ray", "--", "python", "s.py")
    assert "-P" not in start_command("torchrun", command, "py", KINDS["azure_ml"]), "the code is in the working folder"


def test_why_a_script_ended_is_one_line() -> None:
    trace = 'Traceback (most recent call last):\n  File "/home/me/a.py", line 7, in <module>\n    read()\n'
    deeper = f"  File \"{click.__file__}\", line 9, in load\nKeyError: 'x'\n"
    assert explain_end(1, trace + deeper).endswith("KeyError: 'x' (/home/me/a.py, line 7)")
    refused = f"{trace}trainer.errors.ConfigError: training.a is not a setting\ntraining.b = 0: it should be more\n"
    told = "training.a is not a setting; training.b = 0: it should be more (/home/me/a.py, line 7)"
    assert explain_end(1, refused) == told
    assert "without calling Trainer" in explain_end(0, "a warning")
    assert explain_end(3, "") == "it ended with exit code 3 before it trained, and printed nothing"
