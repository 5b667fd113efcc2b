"""The trials of a script: each is what the script makes of its arguments, on the same samples, or it is refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.jobs.script_job import describe_script
from dtrain_dagster.search.script import SearchedScript, arguments_of
from dtrain_dagster.search.space import SpaceError, check_space, parse_space
from trainer.config import ConfigError, DatasetRef, JobConfig
from trainer.rundir import RunDir

BASE = JobConfig(job_id="base", run_dir="/tmp/base", dataset=DatasetRef(uri="/tmp/data"))
DTRAIN = str(Path(sys.executable).parent / "dtrain")
SCRIPT = """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--rows", type=int, default=96)
parser.add_argument("--flat", action="store_true")
given = parser.parse_args()

import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainer import Trainer


def data(rows, seed):
    inputs = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


torch.manual_seed(0)
layers = [nn.Linear(4, 3)] if given.flat else [nn.Linear(4, given.width), nn.ReLU(), nn.Linear(given.width, 3)]
config = {"epochs": 2, "batch_size_per_gpu": 16, "learning_rate": given.lr}
Trainer(nn.Sequential(*layers), config, loss=nn.CrossEntropyLoss()).fit(data(given.rows, 0), data(32, 1))
"""


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"args.width": 8, "args.lr": 0.5}, "--width 8 --lr 0.5"),
        ({"args.flat": True, "args.width": 4}, "--flat --width 4"),
        ({"args.flat": False, "args.width": None}, ""),
        ({"args.sizes": [8, 16], "training.epochs": 3}, "--sizes 8 16"),
        ({"args.width": "a b"}, "--width 'a b'"),
    ],
)
def test_values_become_the_arguments_that_scripts_take(values: dict[str, Any], words: str) -> None:
    assert shlex.join(arguments_of(values)) == words


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("args.width", "args are .*of a script, and this job has none"),
        ("args.", r"args\."),
    ],
)
def test_arguments_belong_to_a_script(name: str, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        check_space(parse_space({name: [1, 2]}), BASE)


@pytest.mark.slow
def test_a_trial_is_what_the_script_makes_of_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that follow from an argument are ordered, too: they would have no effect on the nodes otherwise. What
    the script does not take, or what changes its data, is refused."""
    (tmp_path / "net.py").write_text(SCRIPT)
    script = SearchedScript(path=str(tmp_path / "net.py"), arguments=("--rows", "64"), overrides=(), digest="d")
    run_dir = str(tmp_path / "jobs" / "trial")
    described = describe_script(script.path, script.arguments, ["training.world_size=2"], "trial", run_dir)
    base = described.job
    values = {"args.lr": 0.5, "args.width": 16, "training.epochs": 4}
    job, command = script.job_of(base, values, "trial 0"), script.command(values)
    assert command[1:] == (script.path, "--rows", "64", "--lr", "0.5", "--width", "16")
    assert (job.training.learning_rate, job.training.epochs, job.training.world_size) == (0.5, 4, 2)
    assert (job.job_id, job.run_dir, job.dataset) == (base.job_id, base.run_dir, base.dataset)
    said = shlex.split(script.words(values))
    assert said == ["dtrain", "train", "--script", script.path, "--set", "training.epochs=4", "--", *command[2:]]
    check_space(parse_space({"args.lr": [0.25, 0.5], "training.epochs": [3, 4]}), base)

    refused = r"a trial with args.depth = 1: .*unrecognized arguments: --depth 1"
    with pytest.raises(ConfigError, match=refused):
        check_space(parse_space({"args.depth": [1, 2]}), base, source="--space", make=script.job_of)
    other = replace(base, dataset=replace(base.dataset, dataset_id="of-32-rows"))
    monkeypatch.setattr("dtrain_dagster.search.script.describe_script", lambda *_, **__: replace(described, job=other))
    with pytest.raises(ConfigError, match="with --rows 32 the script trains on other data"):
        check_space(parse_space({"args.rows": [32, 64]}), base, source="--space", make=script.job_of)


@pytest.mark.long
def test_a_script_is_searched_on_the_cluster(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if not name.startswith("DTRAIN_")}
    env |= {
        "DTRAIN_HOME": str(tmp_path / "home"),
        "DTRAIN_THREADS_PER_RANK": "1",
        "DTRAIN_OPTIONS": "command_tracking=off",
    }
    space = json.dumps({"args.width": [4, 16], "args.flat": [True, False]})
    asked = [DTRAIN, "search", "--script", "net.py", "--space", space, "--trials", "2", "--nodes", "2", "--json",
             "--sampler", "random", "--pruner", "none", "--name", "wide", "--", "--lr", "0.02"]  # fmt: skip
    done = subprocess.run(asked, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert [row["state"] for row in result["trials"]] == ["complete", "complete"]
    assert result["settings_file"] is None
    assert result["command"].startswith(f"dtrain train --script {tmp_path}/net.py -- --lr 0.02")
    for row in result["trials"]:
        job = RunDir(f"{tmp_path}/home/storage/jobs/wide-{row['trial']:04d}").read_job()
        assert job.training.learning_rate == 0.02
    assert result["best"]["score"] == min(row["score"] for row in result["trials"])
