"""Where a training comes from, as tags that MLflow's pages show: who started it, by what, and at which commit."""

from __future__ import annotations

import getpass
import subprocess
from contextlib import suppress
from pathlib import Path

SOURCE_TAG = "mlflow.source.name"
GIT_SECONDS = 5.0
"""The longest time that git is waited for."""


def source_tags(entry: str, folder: Path) -> dict[str, str]:
    """Return the tags that say where a training comes from: who started it, by what, and at which commit of the
    repository that the folder lies in, where it is one. The repository's address is left out: it may hold a token."""
    tags = {SOURCE_TAG: entry}
    if commit := _git(folder, "rev-parse", "HEAD"):
        tags["mlflow.source.git.commit"] = commit
        if (branch := _git(folder, "rev-parse", "--abbrev-ref", "HEAD")) and branch != "HEAD":
            tags["mlflow.source.git.branch"] = branch
        tags["mlflow.source.git.dirty"] = str(bool(_git(folder, "status", "--porcelain", "--untracked-files=no")))
    with suppress(KeyError, OSError):  # a container's user without a name
        tags["mlflow.user"] = getpass.getuser()
    return tags


def _git(folder: Path, *arguments: str) -> str:
    """Return what a command of git says; "" where there is no repository, or no git."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments], cwd=folder, capture_output=True, text=True, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
