from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(
    0, str(Path(__file__).parents[2])
)  # for tests.azure.azurite and tests.azure.emulator, here and in processes

from tests.azure.azurite import Azurite, missing


@pytest.fixture(scope="session")
def azurite() -> Iterator[Azurite]:
    """A storage account for the whole session, found by key. Its containers are shared: make one of your own."""
    if why := missing():
        pytest.skip(why)
    with Azurite() as account:
        yield account


@pytest.fixture
def container(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Makes containers; gives their addresses (``az://…``), which this process and its children can open."""
    for name in ("AZURE_STORAGE_ACCOUNT_URL", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    for name, value in azurite.environment.items():
        monkeypatch.setenv(name, value)

    def make() -> str:
        name = f"c{uuid.uuid4().hex[:12]}"
        azurite.create_container(name)
        return f"az://{name}"

    return make
