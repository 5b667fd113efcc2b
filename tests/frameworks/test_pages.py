"""The commands of the pages on other frameworks are run, in the environment of `make test-engines`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.checkout import make_checkout
from tests.docs.page import Page, run_in
from tests.frameworks.shell import DTRAIN, needs

SMALL_TABLE = """make setup
python -m examples.table.make_table tumours.parquet
dtrain data tumours.parquet --target diagnosis
mv digits.py my_training.py"""
PAGES = [
    Page("docs/frameworks.md", blocks=slice(0, 1)),
    Page("docs/frameworks.md", SMALL_TABLE, {"--nodes 3": "--nodes 2 --epochs 1"}, slice(1, 2)),
]
PARTS = [page.part for page in PAGES]
"""The blocks that are run here."""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@needs("horovod")
@needs("deepspeed")
@needs("ray")
@needs("tensorflow")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.blocks.start))
def test_the_commands_of_a_page_run(
    page: Page, tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dtrain` is this environment's, which is layered over the one that has the program."""
    checkout = make_checkout(tmp_path / "dtrain")
    [digits] = re.findall(
        r"```python\n(import torch\n.*?)```", (ROOT / "docs" / "own-model-and-data.md").read_text(), re.DOTALL
    )
    (checkout / "digits.py").write_text(digits)
    program = tmp_path / "bin" / "dtrain"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{DTRAIN}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(short_folder))
    run_in(checkout, page.script())
