"""The tutorial, followed to the letter: every block of commands in order, in one shell, in an empty home."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, read_blocks

TUTORIAL = ROOT / "docs" / "tutorial.md"
LEFT_OUT = (".git", ".venv", ".dtrain", ".*_cache", "__pycache__", "out", "tests", "benchmarks", "*.egg-info")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the repository as a new user has it, whose environment is the present one, so that nothing is
    installed."""
    folder = tmp_path / "dtrain"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    (folder / ".venv").mkdir()
    for part in Path(sys.prefix).iterdir():
        if part.name != ".ready":
            (folder / ".venv" / part.name).symlink_to(part)
    (folder / ".venv" / ".ready").touch()
    return folder


def script_of(blocks: list[Block]) -> str:
    """Return the blocks as one script, which says where it is and stops at the first failure. A block of commands that
    have to fail goes on after them. Servers are only looked at, since each has tests of its own."""
    lines = ["set -euo pipefail"]
    for number, block in enumerate(blocks, start=1):
        lines.append(f"echo '=== block {number}'")
        if block.kind == "fails":
            lines += [f"if ( {line} ); then exit 99; fi" for line in block.script.splitlines()]
        elif block.kind == "server":
            lines += [f"make --dry-run {line.split()[1]} >/dev/null" for line in block.script.splitlines()]
        else:
            lines.append(block.script)
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_tutorial_is_followed_to_the_letter(checkout: Path):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("DTRAIN_", "DAGSTER_", "MAKE"))
    } | {"PYTHONPATH": str(checkout), "COLUMNS": "100"}
    if "DTRAIN_CACHE" in os.environ:
        environment["DTRAIN_CACHE"] = os.environ["DTRAIN_CACHE"]
    done = subprocess.run(
        ["bash", "-c", script_of(read_blocks(TUTORIAL.read_text()))],
        cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    said = done.stdout
    assert done.returncode == 0, said[-5000:]
    for promised in (
        "registered  stock-return-distribution version 1, alias champion",
        "did you mean training.learning_rate?",
        "lost node(s)",
        "took in node(s)",
        "lost to a failure",
        "resumed from checkpoints/",
        "over 2 launches",
        "job       mine",
        "test accuracy",
    ):
        assert promised in said, f"{promised!r} is not in\n{said[-8000:]}"
    assert not (checkout / ".dtrain" / "storage").exists(), "the last step cleans up"
    assert not (checkout / "my_model.py").exists()
