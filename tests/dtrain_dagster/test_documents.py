"""What the documents promise is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dtrain_dagster.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readme_lists_every_setting_with_its_default_and_no_other():
    readme = (ROOT / "README.md").read_text()
    listed = dict(re.findall(r"^\| `(DTRAIN_[A-Z_]+)` \| (.*?) \|", readme, flags=re.MULTILINE))
    defaults = {f"{PREFIX}{name.upper()}": field.get_default() for name, field in Settings.model_fields.items()}
    assert listed == {name: "" if value is None else f"`{value}`" for name, value in defaults.items()}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_pictures_lead_somewhere(document: Path):
    for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} names {target}, which is not there"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_modules_that_are_named_exist(document: Path):
    named = re.findall(r"`((?:dtrain_dagster|trainer|tests|examples|docs|benchmarks)/[\w./]+)`", document.read_text())
    for path in named:
        assert (ROOT / path).exists(), f"{document.name} names {path}, which is not there"


def test_every_make_target_of_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    for document in DOCUMENTS:
        for target in re.findall(r"(?:^|`|=\S* )make ([a-z-]+)", document.read_text(), flags=re.MULTILINE):
            assert target in targets, f"{document.name}: make {target}"
