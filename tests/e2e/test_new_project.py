"""`dtrain init`, from the wheel: what it makes runs, by the commands that its README gives."""

from __future__ import annotations

import json
import os
import re
import subprocess
import venv
from pathlib import Path

import pytest

from .wheel import build_wheel, layered_environment, plain_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
TRIALS = {
    "table-own-model": ("--table", "example", "--own-model"),
    "table": ("--table", "example"),
    "prices": (),
}
"""What a project begins with. Each makes a champion; the small network on the bundled prices, which `--own-model` alone
begins with, may or may not."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def layered(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel, which sees the packages of this one beside it."""
    python = layered_environment(tmp_path_factory.mktemp("layered") / "venv", wheel)
    program = python.parent / "dagster"  # that of the packages beside it would start their Python
    program.write_text(f"#!{python}\nfrom dagster.__main__ import main\nmain()\n")
    program.chmod(0o755)
    return python


def run(command: str, python: Path, at: Path, **own: str) -> str:
    """What a command of a shell says, with the programs of this environment; it must end well."""
    env = plain_environment() | {"DTRAIN_NODES": "2", "DTRAIN_THREADS_PER_RANK": "1"} | own
    env["PATH"] = f"{python.parent}{os.pathsep}{env['PATH']}"
    pipe = subprocess.PIPE
    done = subprocess.run(
        ["bash", "-c", command], cwd=at, env=env, text=True, stdout=pipe, stderr=subprocess.STDOUT, timeout=1500
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def first_command(readme: Path) -> str:
    """The command of a project's README that makes the graph."""
    found = re.search(r"^python -m dtrain_dagster work .*$", readme.read_text(), re.MULTILINE)
    assert found
    return found[0]


def trial(python: Path, at: Path, options: tuple[str, ...]) -> None:
    """Make a project, and its graph; look at what is there then."""
    said = run(f"dtrain init team {' '.join(options)}", python, at)
    team = at / "team"
    command = first_command(team / "README.md")
    assert command in said
    made = run(command, python, team)
    assert "champion: the gate passed" in made
    assert (team / ".dtrain" / "dagster" / "dagster.yaml").is_file(), "runs are kept where `dtrain ui` looks"
    kinds = {folder.name.split("-")[0] for folder in (team / ".dtrain" / "storage" / "jobs").glob("*-team-*")}
    assert "train" in kinds
    code = (
        "import json; from mlflow import MlflowClient; from dtrain_dagster.settings.environment import load_settings\n"
        "[found] = MlflowClient(load_settings().tracking_uri).search_registered_models()\n"
        "print(json.dumps([found.name, sorted(found.aliases)]))"
    )
    assert json.loads(run(f"{python} -c '{code}'", python, team).splitlines()[-1]) == ["team", ["champion"]]


@pytest.mark.long
@pytest.mark.parametrize("start", TRIALS)
def test_a_project_from_the_wheel_makes_its_graph(start: str, layered: Path, tmp_path: Path) -> None:
    trial(layered, tmp_path, TRIALS[start])


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_project_in_an_environment_that_was_empty(wheel: Path, tmp_path: Path) -> None:
    """All packages are fetched, torch's build for CPUs among them."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(f"{python} -m pip install -q --extra-index-url https://download.pytorch.org/whl/cpu {wheel}", python, tmp_path)
    trial(python, tmp_path, TRIALS["table-own-model"])
