"""What several files of attacks share."""

from __future__ import annotations

import pytest

from tests.abuse.hostile_nodes import Place


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A home with one finished training, of whose run directory tests change copies."""
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTRAIN_CACHE", str(folder / "cache"))
        return Place(folder)
