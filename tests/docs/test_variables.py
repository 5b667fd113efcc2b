"""Each environment variable that the code reads is in the reference, or on the list of those that nobody sets."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from dtrain_dagster.settings.variables import INTERNAL
from tests.docs.blocks import REFERENCE, ROOT

pytestmark = pytest.mark.lint
_NAME = re.compile(r"[A-Z][A-Z0-9]+(_[A-Z0-9]+)*")
_PLACE = re.compile(r"environ|\benv\b|variables|getenv")
"""What an expression is called that holds variables of the environment."""
_READ = {"get", "setdefault", "pop", "getenv"}
_IN_SHELL = re.compile(r"\$\$?\{?([A-Z][A-Z0-9_]+)\b|^([A-Z][A-Z0-9_]+) \?=", flags=re.MULTILINE)
_SET_IN_SHELL = re.compile(r"(?:^|\s)(?:export |local |ARG |define )?([A-Z][A-Z0-9_]+) ?:?=", flags=re.MULTILINE)
_OF_EVERY_SHELL = {"HOME", "PATH", "SHELLFLAGS"}
_LIST = ROOT / "dtrain_dagster" / "settings" / "variables.py"
"""What is only listed there is not read there."""


def literals(node: ast.AST) -> set[str]:
    """Return all texts in an expression that could name a variable, but for parts of formatted ones."""
    return literals_of(list(ast.walk(node)))


def literals_of(nodes: Sequence[ast.AST]) -> set[str]:
    parts = {id(part) for item in nodes if isinstance(item, ast.JoinedStr) for part in item.values}
    found = (item.value for item in nodes if isinstance(item, ast.Constant) and id(item) not in parts)
    return {text for text in found if isinstance(text, str) and _NAME.fullmatch(text)}


class Module:
    """The names of variables that one module of these nodes reads. ``constants`` has the texts of the constants of all
    modules, by module and name, by which names that are imported are resolved."""

    def __init__(self, name: str, nodes: Sequence[ast.AST], constants: Mapping[tuple[str, str], set[str]]) -> None:
        self.constants: dict[str, set[str]] = {each: texts for (own, each), texts in constants.items() if own == name}
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                for item in node.names:
                    self.constants[item.asname or item.name] = constants.get((node.module or "", item.name), set())
        self.loops: dict[str, list[ast.expr]] = defaultdict(list)
        """What each name runs over in a loop of this module."""
        for node in nodes:
            if isinstance(node, ast.For | ast.comprehension):
                for target in ast.walk(node.target):
                    if isinstance(target, ast.Name):
                        self.loops[target.id].append(node.iter)
        self.read = {name for node in nodes for key in self.keys(node) for name in self.names(key)}

    def keys(self, node: ast.AST) -> Iterable[ast.expr]:
        """Return the key where the node looks into an environment."""
        match node:
            case ast.Subscript(value=place, slice=key) if _PLACE.search(ast.unparse(place)):
                return (key,)
            case ast.Call(func=ast.Attribute(attr=attr) as func, args=[key, *_]) if attr in _READ:
                return (key,) if _PLACE.search(ast.unparse(func)) else ()
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[place]):
                return (key,) if _PLACE.search(ast.unparse(place)) else ()
        return ()

    def names(self, key: ast.expr, depth: int = 3) -> set[str]:
        """Return the variables that a key may name: a text, a constant of any module, or what a loop runs over."""
        if isinstance(key, ast.Name) and key.id in self.loops and depth:
            return {name for over in self.loops[key.id] for name in self.within(over, depth - 1)}
        if isinstance(key, ast.Name):
            return self.constants.get(key.id, set())
        return literals(key) if isinstance(key, ast.Constant) else set()

    def within(self, over: ast.expr, depth: int) -> set[str]:
        inner = (item for item in ast.walk(over) if isinstance(item, ast.Name))
        return literals(over) | {name for item in inner for name in self.names(item, depth)}


def read_by_python(folders: Iterable[Path]) -> dict[str, str]:
    """Return the variables that modules read, each with one of these modules."""
    paths = (path for folder in folders for path in sorted(folder.rglob("*.py")) if path != _LIST)
    trees = {path: ast.parse(path.read_text()) for path in paths}
    names = {path: path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in trees}
    constants: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.Assign):
                targets = (name for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name))
                for name in targets:
                    constants[names[path], name.id] |= literals(node.value)
    found = {}
    for path, tree in trees.items():
        nodes = list(ast.walk(tree))
        ours = {text for text in literals_of(nodes) if text.startswith("DTRAIN_")}
        for variable in Module(names[path], nodes, constants).read | ours:
            found[variable] = str(path.relative_to(ROOT))
    return found


def read_by_shells() -> dict[str, str]:
    """Return the variables that the Makefile and the scripts of deploy take from outside, each with one of these."""
    found = {}
    scripts = sorted(path for name in ("deploy", "tools") for path in (ROOT / name).rglob("*.sh"))
    for path in (ROOT / "Makefile", *scripts):
        text = "\n".join(line.partition(" #")[0] for line in path.read_text().splitlines() if not line.startswith("#"))
        given = set(_SET_IN_SHELL.findall(text)) - {also for _, also in _IN_SHELL.findall(text)}
        asked = {name or also for name, also in _IN_SHELL.findall(text)} | set(re.findall(r"\$\(if \$\((\w+)\)", text))
        asked_with_default = set(re.findall(r"\$\$?\{([A-Z][A-Z0-9_]+):[-?]", text))
        for name in (asked - given | asked_with_default) - _OF_EVERY_SHELL:
            found[name] = str(path.relative_to(ROOT))
    return found


@cache
def all_read() -> dict[str, str]:
    return read_by_shells() | read_by_python((ROOT / "trainer", ROOT / "dtrain_dagster"))


def in_reference() -> set[str]:
    text = (REFERENCE / "settings.md").read_text()
    return set(re.findall(r"^\| `([A-Z0-9_]+)` \|", text, flags=re.MULTILINE))


@pytest.mark.slow
def test_each_variable_that_the_code_reads_is_in_the_reference_or_internal():
    found = all_read()
    assert {"DTRAIN_CACHE", "NCCL_SOCKET_IFNAME", "OMPI_COMM_WORLD_RANK", "TORCH_INDEX", "DRY_RUN"} <= set(found)
    told = in_reference() | set(INTERNAL)
    missing = {name: where for name, where in found.items() if name not in told}
    assert missing == {}, "add them to dtrain_dagster/settings/variables.py, or to a class of settings"


def test_no_variable_is_both_told_and_internal_and_each_internal_one_has_a_reason():
    assert in_reference() & set(INTERNAL) == set()
    assert all(INTERNAL.values())


@pytest.mark.slow
def test_no_variable_is_told_that_nothing_reads():
    """Those of settings are read by their classes."""
    from dtrain_dagster.settings.variables import GROUPS

    found = all_read()
    plain = {name for group in GROUPS for name in group.variables} | set(INTERNAL)
    assert {name for name in plain if name not in found} == set()
