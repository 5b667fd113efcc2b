"""The templates of `deploy/azure`, read by a second parser: syntax, and names. What they mean is in `test_deploy`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.lint
AZURE = Path(__file__).parents[2] / "deploy" / "azure"
FILES = sorted(AZURE.rglob("*.bicep"))
FUNCTIONS = {
    *("contains", "empty", "environment", "guid", "items", "replace", "resourceGroup", "resourceId", "subscription"),
    *("subscriptionResourceId", "toLower", "uniqueString", "utcNow"),
    *("allowed", "description", "maxLength", "maxValue", "minLength", "minValue"),  # decorators
}
"""Bicep's own, as far as they are used here."""


def tree_of(source: bytes) -> Any:
    """The root of what the grammar of tree-sitter makes of a file. It shares nothing with pycep."""
    import tree_sitter_bicep
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bicep.language())).parse(source).root_node


def nodes_of(root: Any) -> Iterator[Any]:
    yield root
    for child in root.children:
        yield from nodes_of(child)


def faults_of_syntax(source: bytes) -> list[str]:
    """Where there is no Bicep: line and text."""
    bad = [node for node in nodes_of(tree_of(source)) if node.is_error or node.is_missing]
    return [f"line {node.start_point[0] + 1}: {node.text.decode()[:60] or node.type}" for node in bad]


def faults_of_names(source: bytes) -> list[str]:
    """Names that are used and not declared, functions that are not Bicep's, and parameters and variables that nothing
    uses: what the compiler would refuse, or warn of."""
    declared, optional, used, called = set(), set(), set(), set()
    for node in nodes_of(tree_of(source)):
        own = next((child for child in node.children if child.type == "identifier"), None)
        if node.type.endswith("_declaration"):
            name = own.text.decode() if own else ""
            if node.type != "output_declaration":
                declared.add(name)
            if node.type in ("parameter_declaration", "variable_declaration"):
                optional.add(name)
        elif node.type in ("loop_variable", "loop_enumerator"):
            declared.add(node.text.decode())
        elif node.type == "identifier" and source[node.end_byte :][:1] == b"(":  # in lists the grammar knows no calls
            called.add(node.text.decode())
        elif node.type == "identifier" and not (
            (node.parent.type.endswith("_declaration") or node.parent.type == "object_property")
            and node == next(child for child in node.parent.children if child.type == "identifier")
        ):
            used.add(node.text.decode())
    found = [f"{name} is not declared" for name in sorted(used - declared)]
    found += [f"{name} is no function" for name in sorted(called - FUNCTIONS)]
    return found + [f"{name} is not used" for name in sorted(optional - used)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_second_parser_reads_them_too(file: Path) -> None:
    assert faults_of_syntax(file.read_bytes()) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_name_is_declared_and_used(file: Path) -> None:
    assert faults_of_names(file.read_bytes()) == []


@pytest.mark.parametrize(
    ("there", "planted", "fault"),
    [
        ("amount: amount", "amount: amounts", ["amounts is not declared", "amount is not used"]),
        ("param start string", "param start string\nparam end string", ["end is not used"]),
        ("startDate: start", "startDate: today(start)", ["today is no function"]),
        ("startDate: start", "startDate: '${strat}'", ["strat is not declared", "start is not used"]),
    ],
)
def test_a_wrong_name_is_found(there: str, planted: str, fault: list[str]) -> None:
    source = (AZURE / "modules/budget.bicep").read_text()
    assert there in source
    assert faults_of_names(source.replace(there, planted, 1).encode()) == fault
