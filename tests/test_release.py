"""`make release`: the version is in one place, the changelog gets its section, and what is built is complete."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SUPPLY = ROOT / "tools" / "supply"
CHANGES = "# Changelog\n\n## Unreleased\n\n### Added\n\n- A thing.\n\n## 0.0.1 (2026-01-01)\n\n- The first.\n"


def ask(call: str, *arguments: str) -> Any:
    """What a function of the script returns, or the words of its refusal."""
    code = (
        "import json, sys, release\n"
        f"try: print(json.dumps(release.{call}(*json.loads(sys.argv[1]))))\n"
        "except release.ReleaseError as error: print(json.dumps(f'refused: {error}'))"
    )
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    return json.loads(subprocess.run(command, cwd=SUPPLY, capture_output=True, text=True, check=True).stdout)


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


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the packages and the script of this one, all committed."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("trainer", "dtrain_dagster"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "tools/supply/release.py", ".gitignore"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "CHANGELOG.md").write_text(CHANGES)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "config", "user.name", "a")
    git(folder, "config", "user.email", "a@example.com")
    commit(folder)
    return folder


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
@pytest.mark.timeout(600)
def test_a_release_is_tried_then_made_and_a_file_that_is_not_packed_refuses_it(repository: Path):
    before = git(repository, "rev-parse", "HEAD")
    assert "nothing was changed" in release(repository, "0.2.0", "--dry-run")
    assert (git(repository, "rev-parse", "HEAD"), git(repository, "status", "--porcelain")) == (before, "")
    assert not (repository / "dist").exists()
    (repository / "out.json").write_text("{}")
    assert "not committed" in release(repository, "0.2.0", code=2)
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
    (repository / "trainer" / "forgotten.txt").write_text("x")
    text = (repository / "CHANGELOG.md").read_text()
    (repository / "CHANGELOG.md").write_text(text.replace("## Unreleased\n", "## Unreleased\n\n- More.\n"))
    commit(repository)
    assert "lacks trainer/forgotten.txt" in release(repository, "0.3.0", "--dry-run", code=2)
