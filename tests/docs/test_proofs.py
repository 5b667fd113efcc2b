"""The page of proofs names files that exist, and says of which `make test` runs nothing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "proofs.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)`")


def is_long(node: ast.AST) -> bool:
    """Say whether an expression names the marker `long`, other than for single values of a parameter."""
    text = ast.unparse(node)
    return "mark.long" in text and "pytest.param" not in text


def has_quick_test(path: Path) -> bool:
    """Say whether `make test` runs a test of this file."""
    module = ast.parse(path.read_text())
    marks = [
        node.value
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    if any(is_long(value) for value in marks):
        return False
    tests = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return any(not any(is_long(decorator) for decorator in test.decorator_list) for test in tests)


def read_rows() -> list[str]:
    return [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and _TEST.search(line)]


def test_each_file_that_the_page_names_exists():
    missing = {name for row in read_rows() for name in _TEST.findall(row) if not (ROOT / name).is_file()}
    assert not missing


@pytest.mark.parametrize("row", read_rows(), ids=lambda row: row[2:50])
def test_a_row_says_where_only_make_test_all_runs_its_test(row: str):
    named = [name for name in _TEST.findall(row) if name.split("/")[-1].startswith("test_")]
    long = [name for name in named if not has_quick_test(ROOT / name)]
    assert not long or "make test-all" in row, f"{', '.join(long)}: long only"
