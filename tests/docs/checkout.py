"""A copy of the repository, as a new user has it, in which commands of the documentation are run."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tests.docs.blocks import ROOT

LEFT_OUT = (".git", ".venv", ".dtrain", ".*_cache", "__pycache__", "out", "_site", "*.egg-info")


def make_checkout(folder: Path) -> Path:
    """Copy the repository to a folder, whose environment is the present one, so that nothing is installed."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    (folder / ".venv").mkdir()
    for part in Path(sys.prefix).iterdir():
        if part.name != ".ready":
            (folder / ".venv" / part.name).symlink_to(part)
    (folder / ".venv" / ".ready").touch()
    return folder


def environment_in(checkout: Path) -> dict[str, str]:
    """Return the environment of a user's shell there: no setting of dtrain or Dagster, but the cache of these tests."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DTRAIN_", "DAGSTER_", "MAKE"))}
    cache = {key: os.environ[key] for key in ("DTRAIN_CACHE",) if key in os.environ}
    return kept | cache | {"PYTHONPATH": str(checkout), "COLUMNS": "100"}
