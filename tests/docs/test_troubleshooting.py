"""Messages that the section on troubleshooting lists are messages that the code has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "monitoring.md").read_text()
MESSAGES = [message for line in re.findall(r"^### (`.*)$", PAGE, flags=re.MULTILINE)
            for message in re.findall(r"`([^`]+)`", line) if " " in message]  # fmt: skip


def texts_of(path: Path) -> list[str]:
    """Return the texts of a module; what an f-string fills in is «…»."""
    texts = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            texts.append("".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values))
    return texts


@pytest.fixture(scope="session")
def written() -> str:
    sources = [path for package in ("trainer", "dtrain_dagster") for path in (ROOT / package).rglob("*.py")]
    return "\n".join([(ROOT / "Makefile").read_text(), *(text for path in sources for text in texts_of(path))])


def test_messages_are_found():
    assert len(MESSAGES) >= 12


@pytest.mark.parametrize("message", MESSAGES)
def test_a_listed_message_is_in_the_code(message: str, written: str):
    parts = [part.strip(" ?") for part in re.split("[…;:,]", message)]
    assert [part for part in parts if len(part) > 3 and part not in written] == []
