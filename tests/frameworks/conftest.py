"""A shell for each test of a framework."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frameworks.shell import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DTRAIN_", "RAY_"))}
    return Shell(tmp_path, inherited | {"DTRAIN_HOME": str(tmp_path / "home"), "PYTHONPATH": os.getcwd()})


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for temporary files in whose folders the paths of sockets are short enough."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder)
