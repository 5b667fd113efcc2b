"""The public API changes only where a person says so: the code is held against the list and a stored copy."""

from __future__ import annotations

import difflib

import pytest

import trainer
from tests.public_api import SNAPSHOT, describe, documented, render
from tests.test_public_paths import PUBLIC


def test_all_that_users_import_is_documented() -> None:
    found = documented()
    missing = {
        module: sorted(set(names) - set(found.get(module, ())))
        for module, names in PUBLIC.items()
        if module != "trainer.fit"  # its names are those of `trainer`
    }
    assert {module: names for module, names in missing.items() if names} == {}
    assert set(trainer.__all__) - set(found["trainer"]) == {"__version__"}


def test_a_change_is_seen() -> None:
    def before(a: int, b: int = 1) -> None: ...

    def after(a: int, b: int = 2) -> None: ...

    assert list(describe("f", before)) != list(describe("f", after))


@pytest.mark.slow
def test_names_and_signatures_are_those_that_were_announced() -> None:
    stored, now = SNAPSHOT.read_text().splitlines(), render().splitlines()
    changed = "\n".join(difflib.unified_diff(stored, now, "announced", "now", lineterm="", n=0))
    assert not changed, (
        f"the public API has changed:\n{changed}\nIf that is meant: a line in CHANGELOG.md, and "
        "`python -m tests.public_api`"
    )
