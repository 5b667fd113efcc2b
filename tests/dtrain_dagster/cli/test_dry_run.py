"""`--dry-run`: what is printed is what the cluster then gets, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dtrain_dagster.cli.main import main
from harness.small_job import write_dataset

TELL = """
import json, os
from pathlib import Path
Path(__file__).with_name(f"rank{os.environ['RANK']}.json").write_text(json.dumps(dict(os.environ)))
"""
DRAWN = {"DTRAIN_JOB_TOKEN", "DTRAIN_LAUNCH_SECRET_FILE", "MASTER_PORT"}
"""Variables with what is drawn, or struck out."""


def dtrain(folder: Path, *words: str, **env: str) -> Result:
    """A command of a person whose home is in this folder."""
    own = {"DTRAIN_HOME": str(folder / "home"), "DTRAIN_OPTIONS": "command_tracking=off", **env}
    return CliRunner().invoke(main, words, env=own)


def test_a_training_is_shown_with_its_price_and_its_checks_and_leaves_nothing(tmp_path: Path):
    write_dataset(tmp_path / "walks")
    words = ("train", "--dataset", str(tmp_path / "walks"), "--nodes", "2", "--name", "night", "--dry-run")
    done = dtrain(tmp_path, *words, HF_TOKEN="very-secret")
    assert done.exit_code == 0, done.output
    assert "price: 2 nodes of Standard_NC6s_v3 (dedicated) at $3.06 are $6.12 per hour (stand-in price" in done.stderr
    assert "expected: not known" in done.stderr
    assert "ok: local: nodes are processes of this machine" in done.stderr
    assert done.stderr.endswith("dry run: nothing was bought, submitted or written\n")
    assert f"-m trainer --config {tmp_path}/home/storage/jobs/night/job.json" in done.stdout
    assert """ 'DTRAIN_ORDER={"is_tracked": false}' """ in done.stdout, (
        "a training that goes on says so too, though job.json names an MLflow"
    )
    assert "# node 1: the same, with NODE_RANK, GROUP_RANK = K and RANK = K" in done.stdout
    assert not (tmp_path / "home").exists()


def test_a_ceiling_refuses_a_dry_run_as_it_refuses_the_start(tmp_path: Path):
    write_dataset(tmp_path / "walks")
    dtrain(tmp_path, "cost", "ceilings", "--per-month", "5")
    done = dtrain(tmp_path, "train", "--dataset", str(tmp_path / "walks"), "--nodes", "2", "--dry-run")
    assert done.exit_code == 2
    assert "# node 0" in done.stdout, "what would be asked for is shown all the same"
    assert "note: what it costs is not known, so an hour of its nodes counts" in done.stderr
    assert "refused: the ceiling of $5.00 per month: $0.00 spent in " in done.stderr


@pytest.mark.slow
def test_processes_of_this_machine_get_the_command_and_variables_that_were_printed(tmp_path: Path):
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    words = ("--nodes", "2", "--procs-per-node", "2", "--name", "told", str(script))
    dry = dtrain(tmp_path, "launch", "--dry-run", *words)
    assert dry.exit_code == 0, dry.output
    lines = [line for line in dry.stdout.splitlines() if line and not line.startswith("#")]
    assert dtrain(tmp_path, "launch", *words).exit_code == 0
    for rank, line in enumerate(lines):
        [env, *parts] = shlex.split(line)
        variables = dict(part.split("=", 1) for part in parts[: -len([sys.executable, str(script)])])
        assert env == "env"
        assert parts[-2:] == [sys.executable, str(script)]
        real = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert {name: real.get(name) for name in variables.keys() - DRAWN} == {
            name: value for name, value in variables.items() if name not in DRAWN
        }
        new = {name for name, value in real.items() if os.environ.get(name) != value}
        assert {name for name in new if name.startswith(("RANK", "WORLD", "LOCAL_", "MASTER", "OMP"))} <= set(variables)
    assert len(lines) == 2, "of node 0"
    other = json.loads((tmp_path / "rank3.json").read_text())
    assert (other["NODE_RANK"], other["RANK"]) == ("1", "3"), "K * 2 + LOCAL_RANK"
