"""The page of proofs names files that exist, and says of which `make test` runs nothing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "proofs.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)`")


COMMANDS = {"long": "make test-all", "lint": "make lint"}
"""Marker of what `make test` leaves out → what runs it."""


def has(node: ast.AST, marker: str) -> bool:
    """Say whether an expression names the marker, other than for single values of a parameter."""
    text = ast.unparse(node)
    return f"mark.{marker}" in text and "pytest.param" not in text


def has_test_without(marker: str, path: Path) -> bool:
    """Say whether this file has a test without the marker."""
    module = ast.parse(path.read_text())
    marks = [
        node.value
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    if any(has(value, marker) for value in marks):
        return False
    tests = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return any(not any(has(decorator, marker) for decorator in test.decorator_list) for test in tests)


def read_rows() -> list[str]:
    return [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and _TEST.search(line)]


def test_each_file_that_the_page_names_exists():
    missing = {name for row in read_rows() for name in _TEST.findall(row) if not (ROOT / name).is_file()}
    assert not missing


@pytest.mark.parametrize("marker", COMMANDS)
@pytest.mark.parametrize("row", read_rows(), ids=lambda row: row[2:50])
def test_a_row_says_where_make_test_runs_nothing_of_its_test(row: str, marker: str):
    named = [name for name in _TEST.findall(row) if name.split("/")[-1].startswith("test_")]
    only = [name for name in named if not has_test_without(marker, ROOT / name)]
    assert not only or COMMANDS[marker] in row, f"{', '.join(only)}: {marker} only"
