from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for helpers shared by tests of this folder

from price_files import Panel, prepare


@pytest.fixture(scope="session")
def panel(tmp_path_factory: pytest.TempPathFactory) -> Panel:
    """The bundled panel, written, validated and built; not to be changed."""
    return prepare("sp500_panel", tmp_path_factory.mktemp("panel"))
