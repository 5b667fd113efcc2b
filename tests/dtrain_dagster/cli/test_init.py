"""`dtrain init`: the files of a new project, and what is refused. That they run: `tests/e2e/test_new_project.py`."""

from __future__ import annotations

import ast
import contextlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from click.testing import CliRunner, Result
from packaging.requirements import Requirement

from dtrain_dagster.cli.init import name_of, requirement_of
from dtrain_dagster.cli.main import main

ROOT = Path(__file__).parents[3]
STARTS = {
    "prices": (),
    "prices-own-model": ("--own-model",),
    "table": ("--table", "example"),
    "table-own-model": ("--table", "example", "--own-model"),
}


def init(at: Path, *arguments: str, code: int = 0) -> str:
    """What the command says, started in this folder."""
    with contextlib.chdir(at):
        done: Result = CliRunner().invoke(main, ["init", *arguments])
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a project of each start."""
    folder = tmp_path_factory.mktemp("projects")
    for number, (start, options) in enumerate(STARTS.items()):
        said = init(folder, f"My-Project{number}", *options)
        assert f"python -m dtrain_dagster work dagster asset materialize -m my_project{number}.definitions" in said
        assert f"cd {folder / f'My-Project{number}'}" in said, start
    return folder


@pytest.mark.parametrize("start", STARTS)
def test_the_files_of_a_project(start: str, projects: Path) -> None:
    number = list(STARTS).index(start)
    made, name = projects / f"My-Project{number}", f"my_project{number}"
    project = tomllib.loads((made / "pyproject.toml").read_text())
    assert project["tool"]["dagster"]["module_name"] == f"{name}.definitions"
    assert Requirement(project["project"]["dependencies"][0]).name == "dtrain"
    [location] = yaml.safe_load((made / "workspace.yaml").read_text())["load_from"]
    assert location["python_module"]["module_name"] == f"{name}.definitions"
    workflow = yaml.safe_load((made / ".github/workflows/train.yml").read_text())
    commands = [step.get("run", "") for step in workflow["jobs"]["train"]["steps"]]
    assert any(f"dagster asset materialize -m {name}.definitions" in command for command in commands)
    assert workflow["jobs"]["train"]["env"]["DAGSTER_HOME"] == "${{ github.workspace }}/.dtrain/dagster"
    assert ".dtrain/" in (made / ".gitignore").read_text().splitlines()
    readme = (made / "README.md").read_text()
    named = [line.split("`")[1] for line in readme.splitlines() if line.startswith("| `")]
    assert [path for path in named if not (made / path).exists()] == []
    assert (made / f"{name}_model.py").exists() == ("own-model" in start)


def test_the_code_of_projects_is_clean(projects: Path) -> None:
    for check in (("check", "--select", "E,F,I,UP,B"), ("format", "--check")):
        command = [sys.executable, "-m", "ruff", *check, "--isolated", "--line-length", "120", str(projects)]
        done = subprocess.run(command, cwd=projects, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_graphs_of_projects_load(projects: Path) -> None:
    """In one process, which imports Dagster once."""
    code = "import importlib, json, os, sys\nkeys = {}\n"
    for number, start in enumerate(STARTS):
        code += (
            f"sys.path.insert(0, 'My-Project{number}')\nos.environ.pop('DTRAIN_FACTORY_MODULES', None)\n"
            f"defs = importlib.import_module('my_project{number}.definitions').defs\n"
            f"keys[{start!r}] = [key.to_user_string() for key in defs.resolve_all_asset_keys()]\n"
        )
    command = [sys.executable, "-c", f"{code}print(json.dumps(keys))"]
    done = subprocess.run(command, cwd=projects, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for number, (start, keys) in enumerate(json.loads(done.stdout.splitlines()[-1]).items()):
        first = "table" if "table" in start else "stock_prices"
        parts = (first, "sharded_dataset", "trained_checkpoint", "registered_model")
        assert {f"my_project{number}/{part}" for part in parts} <= set(keys)


def test_a_table_of_a_user_is_named_as_seen_from_the_project(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = pd.DataFrame({"rooms": random.integers(1, 90, 99) / 2, 'the "price"': random.normal(size=99)})
    (tmp_path / "houses").mkdir()
    rows.to_parquet(tmp_path / "houses" / "inside.parquet")
    rows.assign(listing=range(99)).to_parquet(tmp_path / "outside.parquet")
    init(tmp_path, "houses", "--table", "houses/inside.parquet", "--target", 'the "price"')
    text = (tmp_path / "houses/houses/definitions.py").read_text()
    assert 'Path(__file__).parents[1] / "inside.parquet"' in text
    assert 'TARGET = "the \\"price\\""' in text
    ast.parse(text)
    init(tmp_path, "flats", "--table", "outside.parquet", "--target", "rooms", "--drop", "listing")
    text = (tmp_path / "flats/flats/definitions.py").read_text()
    assert f'TABLE = Path("{tmp_path}/outside.parquet")' in text
    assert 'PARAMS = RowParams(target=TARGET, drop=("listing",), missing="mean")' in text
    assert "CI needs it at the same path" in (tmp_path / "flats/README.md").read_text()
    assert not (tmp_path / "flats" / "data").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    said = init(tmp_path, "--name", "team", code=2)
    assert "has README.md already" in said
    assert (tmp_path / "README.md").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"], "all or nothing"
    init(tmp_path, "new")
    assert "already" in init(tmp_path, "new", code=2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--name", "torch"), "there is already a Python package of that name"),
        (("--name", "Team"), "lower-case letters"),
        (("9",), "--name gives another"),
        (("x", "--table", "nowhere.parquet"), "needs --target"),
        (("x", "--target", "y"), "needs --table"),
        (("x", "--table", "example", "--drop", "y"), "--drop needs --table FILE"),
        (("x", "--table", "nowhere.parquet", "--target", "y"), "there is no Parquet or CSV file"),
        (("x", "--table", "text.csv", "--target", "y"), "no such column; it has "),
        (("x", "--table", "rows.parquet", "--target", "y"), "no such column; it has a, b"),
        (("x", "--table", "rows.parquet", "--target", "a", "--drop", "c"), "--drop c: "),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    (tmp_path / "text.csv").write_text("a,b\n1,2\n")
    pd.DataFrame({"a": [1], "b": [2]}).to_parquet(tmp_path / "rows.parquet")
    assert says in init(tmp_path, *arguments, code=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.parquet", "text.csv"]


def test_a_project_has_a_home_of_its_own_though_a_folder_above_has_one(tmp_path: Path) -> None:
    init(tmp_path, "team")
    with contextlib.chdir(tmp_path / "team"):
        init(tmp_path / "team", "inner")
    assert (tmp_path / "team" / "inner" / ".dtrain" / ".dtrain-home").is_file()


@pytest.mark.parametrize(
    ("folder", "name"), [("My-Project", "my_project"), ("2024 q1!", "2024_q1"), ("houses", "houses"), ("--", "")]
)
def test_a_package_is_named_after_the_folder(folder: str, name: str) -> None:
    assert name_of(folder) == name


@pytest.mark.parametrize(
    ("version", "url", "text", "is_from_file"),
    [
        ("0.1.0", None, "dtrain>=0.1.0,<0.2", False),
        ("1.4.2", None, "dtrain>=1.4.2,<2", False),
        ("0.1.0", {"url": "file:///w/dtrain-0.1.0-py3-none-any.whl"}, "dtrain>=0.1.0,<0.2", True),
        ("0.1.0", {"url": "https://x.example/dtrain.whl"}, "dtrain @ https://x.example/dtrain.whl", False),
        (
            "0.1.0",
            {"url": "https://x.example/d", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "dtrain @ git+https://x.example/d@abc",
            False,
        ),
    ],
)
def test_the_dependency_is_the_dtrain_that_is_installed(
    version: str, url: dict[str, object] | None, text: str, is_from_file: bool
) -> None:
    assert requirement_of(version, url) == (text, is_from_file)
    Requirement(text)
