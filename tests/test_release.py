"""`make release`: the version is in one place, the changelog gets its section, and what is built is complete."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CHANGES = "# Changelog\n\n## Unreleased\n\n### Added\n\n- A thing.\n\n## 0.0.1 (2026-01-01)\n\n- The first.\n"


def ask(call: str, *arguments: str) -> Any:
    """What a function of the script returns, or the words of its refusal."""
    script = runpy.run_path(str(ROOT / "tools" / "supply" / "release.py"))
    try:
        return script[call](*arguments)
    except script["ReleaseError"] as error:
        return f"refused: {error}"


def test_the_version_is_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "trainer.__version__"}
    assert re.search(r'^__version__ = "\d+\.\d+\.\d+"$', (ROOT / "trainer" / "__init__.py").read_text(), re.MULTILINE)


def test_the_changelog_gets_a_section_with_the_date():
    text, notes = ask("with_release", CHANGES, "0.2.0", "2026-11-26")
    assert text == CHANGES.replace("## Unreleased\n", "## Unreleased\n\n## 0.2.0 (2026-11-26)\n")
    assert notes == "### Added\n\n- A thing."
    assert "nothing under" in ask("with_release", text, "0.3.0", "2026-11-27")
    assert "already" in ask("with_release", CHANGES, "0.0.1", "2026-11-27")


@pytest.mark.parametrize(
    ("version", "says"), [("0.2.0", '"0.2.0"'), ("0.0.9", "before the present one"), ("v0.2", "not written as")]
)
def test_a_version_follows_the_present_one(version: str, says: str):
    assert says in ask("with_version", 'a = 1\n__version__ = "0.1.0"\nb = 2\n', version)


def make_repository(folder: Path, copy: Callable[[Path, Path], object]) -> Path:
    """A repository with this one's script and what ``copy`` copies of its two packages, all committed."""
    for name in ("trainer", "dtrain_dagster"):
        copy(ROOT / name, folder / name)
    for name in ("pyproject.toml", "README.md", "LICENSE", "tools/supply/release.py", ".gitignore"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "CHANGELOG.md").write_text(CHANGES)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "config", "user.name", "a")
    git(folder, "config", "user.email", "a@example.com")
    commit(folder)
    return folder


def copy_all(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))


def copy_name(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    shutil.copy(source / "__init__.py", target)


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "-q", "-m", "x")


def release(folder: Path, *arguments: str, code: int = 0) -> str:
    """What the script says in this repository."""
    command = [sys.executable, "tools/supply/release.py", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_release_that_is_tried_changes_nothing_and_a_file_that_is_not_packed_refuses_it(tmp_path: Path):
    repository = make_repository(tmp_path / "repository", copy_name)
    before = git(repository, "rev-parse", "HEAD")
    assert "nothing was changed" in release(repository, "0.2.0", "--dry-run")
    assert (git(repository, "rev-parse", "HEAD"), git(repository, "status", "--porcelain")) == (before, "")
    assert git(repository, "tag") == ""
    assert not (repository / "dist").exists()
    (repository / "trainer" / "forgotten.txt").write_text("x")
    assert "not committed" in release(repository, "0.2.0", code=2)
    commit(repository)
    assert "lacks trainer/forgotten.txt" in release(repository, "0.2.0", code=2)
    assert (git(repository, "tag"), git(repository, "status", "--porcelain")) == ("", "")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_release_of_these_packages_is_complete(tmp_path: Path):
    repository = make_repository(tmp_path / "repository", copy_all)
    (repository / "out.json").write_text("{}")
    commit(repository)
    assert "git push origin HEAD v0.2.0" in release(repository, "0.2.0", "--sbom", "out.json")
    assert "- A thing." in git(repository, "tag", "--list", "--format=%(contents)", "v0.2.0")
    assert "## 0.2.0 (2" in git(repository, "show", "v0.2.0:CHANGELOG.md")
    assert git(repository, "status", "--porcelain") == ""
    dist = repository / "dist"
    assert sorted(path.name for path in dist.iterdir()) == [
        "dtrain-0.2.0-py3-none-any.whl", "dtrain-0.2.0.cdx.json", "dtrain-0.2.0.tar.gz",
    ]  # fmt: skip
    with zipfile.ZipFile(dist / "dtrain-0.2.0-py3-none-any.whl") as wheel:
        assert b"Version: 0.2.0" in wheel.read("dtrain-0.2.0.dist-info/METADATA")
        assert {"dtrain_dagster/settings/dagster.yaml", "dtrain_dagster/dashboard/static/jobs.js"} <= set(
            wheel.namelist()
        )
    assert "exists already" in release(repository, "0.2.0", code=2)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("extra", "pandas"), [("", "pandas<3"), ("[azure]", "pandas>=3")])
def test_the_wheel_resolves_beside_a_teams_project(tmp_path: Path, extra: str, pandas: str):
    """Beside Lightning, Transformers and either pandas, as pip resolves them; nothing is installed."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--quiet", "--wheel-dir", str(tmp_path), "."], cwd=ROOT, check=True)
    [wheel] = tmp_path.glob("dtrain-*.whl")
    report = tmp_path / "report.json"
    wanted = [f"dtrain{extra} @ {wheel.as_uri()}", "lightning", "transformers", pandas]
    asked = [*pip, "install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report), *wanted]
    done = subprocess.run(asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {item["metadata"]["name"].lower(): item["metadata"] for item in json.loads(report.read_text())["install"]}
    assert {"dtrain", "lightning", "transformers", "torch"} <= found.keys()
    assert found["pandas"]["version"].startswith("2." if pandas == "pandas<3" else "3.")
