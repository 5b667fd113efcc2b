"""Each variable of this project that the code names is in the reference, or on the list of those that nobody sets."""

from __future__ import annotations

import re
from functools import cache

import pytest

from dtrain_dagster.settings.variables import INTERNAL, OF_NODES
from tests.docs.blocks import REFERENCE, ROOT

pytestmark = pytest.mark.lint
_NAME = re.compile(r"(?<=[\"'])DTRAIN_[A-Z0-9_]*[A-Z0-9](?=[\"'])|(?<=[${])DTRAIN_[A-Z0-9_]+")
"""A name as a text in Python, or as a variable in a shell."""
_LIST = ROOT / "dtrain_dagster" / "settings" / "variables.py"
"""What is only listed there is not read there."""


@cache
def named() -> dict[str, str]:
    """Return the variables that the code names, each with one of the files."""
    paths = [path for folder in ("trainer", "dtrain_dagster", "deploy", "tools") for path in (ROOT / folder).rglob("*")]
    code = [path for path in paths if path.suffix in (".py", ".sh") and path != _LIST]
    return {name: str(path) for path in (ROOT / "Makefile", *code) for name in _NAME.findall(path.read_text())}


def in_reference() -> set[str]:
    text = (REFERENCE / "settings.md").read_text()
    return set(re.findall(r"^\| `([A-Z0-9_]+)(?:: \w+)?` \|", text, flags=re.MULTILINE))


def test_each_variable_that_the_code_names_is_in_the_reference_or_internal():
    assert {"DTRAIN_CACHE", "DTRAIN_NOTIFY"} <= set(named())
    told = in_reference() | set(INTERNAL)
    missing = {name: where for name, where in named().items() if name not in told}
    assert missing == {}, "add them to dtrain_dagster/settings/variables.py, or to a class of settings"


def test_no_variable_is_told_that_nothing_reads_nor_twice():
    """Those of settings are read by their classes."""
    plain = {*OF_NODES, *INTERNAL}
    assert plain - set(named()) == set()
    assert in_reference() & set(INTERNAL) == set()
