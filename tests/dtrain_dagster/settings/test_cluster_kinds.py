"""What is said of each kind of cluster is what is declared."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from dtrain_dagster.settings.cluster_kinds import KINDS, KindName, describe_kind

DOCUMENT = Path(__file__).parents[3] / "docs" / "installing.md"


def test_the_documents_table_is_the_declared_one():
    facts = {name: describe_kind(kind) for name, kind in KINDS.items()}
    rows = [f"| {fact} | " + " | ".join(facts[name][fact] for name in facts) + " |" for fact in facts["local"]]
    text = DOCUMENT.read_text()
    assert "| | " + " | ".join(f"`{name}`" for name in facts) + " |" in text
    for row in rows:
        assert row in text


def test_every_kind_that_can_be_set_is_declared():
    assert set(get_args(KindName)) == set(KINDS)
    assert {name for name, kind in KINDS.items() if kind.has_engine} == {"slurm", "kubernetes", "ray"}
    assert [name for name, kind in KINDS.items() if kind.is_this_machine] == ["local"]
