"""The hosted CI runs every test once, by commands that the Makefile has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs_of(path: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return jobs


def test_each_folder_of_tests_is_in_one_shard() -> None:
    shards = jobs_of(ROOT / ".github" / "workflows" / "ci.yml")["test"]["strategy"]["matrix"]["shard"]
    named = " ".join(shards).split()
    folders = {path.parent.relative_to(ROOT).parts[:2] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    assert sorted(named) == sorted({*("/".join(parts) for parts in folders), "tests/*.py"})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_its_commands_are_targets_of_the_makefile(path: Path) -> None:
    commands = [step["run"] for job in jobs_of(path).values() for step in job["steps"] if "run" in step]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert commands
    assert {command.split()[1] for command in commands} <= set(targets)
    assert {command.split()[0] for command in commands} == {"make"}
