from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crowd import Node


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., list[Node]]]:
    """Makes members on threads, one for each letter, that agree in the test's folder."""
    made: list[Node] = []

    def make(names: str, **more: Any) -> list[Node]:
        new = [Node(name, tmp_path, place, **more) for place, name in enumerate(names)]
        made.extend(new)
        return new

    yield make
    for node in made:
        node.close()
