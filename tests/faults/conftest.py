from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "trainer")]  # helpers of both folders

from network import Network, NoNetworkError  # noqa: E402


@pytest.fixture
def network() -> Iterator[Network]:
    """Three hosts; skips where the kernel does not allow them."""
    try:
        made = Network(3)
    except NoNetworkError as error:
        pytest.skip(str(error))
    with made:
        yield made
