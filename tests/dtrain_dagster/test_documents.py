"""What the documents promise is there."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from trainer.config import DistributedTrainingConfig
from trainer.evaluation.gate import POINT_RULE, RULE

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_pictures_lead_somewhere(document: Path):
    for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} names {target}, which is not there"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_modules_that_are_named_exist(document: Path):
    folders = "dtrain_dagster|trainer|tests|harness|examples|docs|benchmarks"
    named = re.findall(rf"`((?:{folders})/[\w./]+)`", document.read_text())
    for path in named:
        assert (ROOT / path).exists(), f"{document.name} names {path}, which is not there"


def test_the_gate_is_described_by_its_own_words():
    text = " ".join((ROOT / "docs/gate.md").read_text().replace("\n> ", " ").split())
    assert RULE in text
    assert POINT_RULE in text


def test_every_make_target_of_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = {
        document.name: re.findall(r"(?:^|`|=\S* )make ([a-z-]+)", document.read_text(), flags=re.MULTILINE)
        for document in DOCUMENTS
    }
    assert {"run", "test"} <= set(named["README.md"])
    for document, wanted in named.items():
        assert set(wanted) <= targets, document


def test_settings_for_speed_are_listed_with_their_defaults():
    text = (ROOT / "docs" / "performance.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", text, flags=re.MULTILINE))
    defaults = {name: json.dumps(value) for name, value in asdict(DistributedTrainingConfig()).items()}
    assert {name: defaults[name] for name in listed} == listed
    speed = {"compile", "prefetch_batches", "data_on_device", "communication", "topk_fraction", "shuffle_block"}
    assert speed <= listed.keys()
