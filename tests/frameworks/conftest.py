"""A shell for each test of a framework."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.frameworks.shell import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DTRAIN_", "RAY_"))}
    return Shell(tmp_path, inherited | {"DTRAIN_HOME": str(tmp_path / "home"), "PYTHONPATH": os.getcwd()})
