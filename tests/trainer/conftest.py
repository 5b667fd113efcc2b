from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for helpers that spawned ranks import as well

from market import Market


@pytest.fixture(scope="session")
def market() -> Market:
    return Market()
