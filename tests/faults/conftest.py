from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.faults.network import Network, NoNetworkError


@pytest.fixture
def network() -> Iterator[Network]:
    """Three hosts; skips where the kernel does not allow them."""
    try:
        made = Network(3)
    except NoNetworkError as error:
        pytest.skip(str(error))
    with made:
        yield made
