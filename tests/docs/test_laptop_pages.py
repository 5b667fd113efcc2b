"""The commands of the pages that need no more than a laptop are run, block by block.

What a page leaves to its reader (a job's name, a table, a number of trials that takes hours) is filled in here. Pages
that take the `latest` dataset of prices come before those that make other ones.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.blocks import ROOT, read_blocks
from tests.docs.checkout import environment_in, make_checkout

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]

MODEL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def make_datasets(size=64):
    inputs = torch.arange(size, dtype=torch.float32)[:, None] / size
    return {"train": TensorDataset(inputs, (inputs[:, 0] > 0.5).long())}


def make_model(**args):
    return nn.Linear(1, 2)
"""
VISITS = """
import pandas as pd
pd.DataFrame({
    "customer": [f"c{n % 40}" for n in range(800)],
    "age": [20 + n % 50 if n % 7 else None for n in range(800)],
    "bought": ["yes" if n % 3 else "no" for n in range(800)],
}).to_parquet("visits.parquet")
"""


class Page(NamedTuple):
    """A page, and what makes its commands ones that can be run here."""

    name: str
    before: str = ""
    """Commands that are run first."""
    filled: Mapping[str, str] = {}
    """Parts of its commands, and what is written instead; a line that becomes empty is left out."""
    blocks: slice = slice(None)
    """The blocks that need no more than a laptop."""


PAGES = [
    Page("costs.md", "dtrain train --dataset latest --nodes 2 --epochs 1 --name JOB", {
        "dtrain cost JOB --usage-export usage.csv # against what Azure has billed": ""}),
    Page("fleet.md", filled={"epochs: 4": "epochs: 1"}),
    Page("hyperparameter-search.md", filled={
        "--trials 40 --budget 5": "--trials 3 --budget 5 --set training.epochs=1 --name NAME"}),
    Page("tuning.md", filled={"tune --dataset latest --nodes 3": "tune --dataset latest --nodes 2 --seconds 60"}),
    Page("large-models.md"),
    Page("own-model-and-data.md", "", {"--your-own-arguments": ""}, slice(0, 1)),
    Page("own-model-and-data.md", "", {"epochs: 2": "epochs: 1", "source .venv/bin/activate": ""}, slice(8, 9)),
    Page("own-model-and-data.md", f"python - <<'EOF'{VISITS}EOF\nmkdir my_texts; cp -r docs/*.md my_texts", {
        '{"width": 256, "layers": 6}\'': '{"width": 32, "layers": 1}\' --set training.max_steps=5'}, slice(4, 6)),
    Page("own-model-and-data.md", f"cat > my_data.py <<'EOF'{MODEL}EOF\ncp my_data.py my_model.py", {}, slice(6, 7)),
    Page("prices.md", filled={"dtrain prices refresh": "true"}),
]  # fmt: skip


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, whose home has the prices' dataset."""
    folder = make_checkout(tmp_path_factory.mktemp("pages") / "dtrain")
    select = "dagster asset materialize -m dtrain_dagster.definitions --select stock_prices,sharded_dataset"
    run(folder, f"make setup\nexport DAGSTER_HOME=$PWD/.dtrain/dagster\n{select}")
    return folder


def run(checkout: Path, script: str) -> str:
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\nexport PATH=$PWD/.venv/bin:$PATH\n{script}"],
        cwd=checkout, env=environment_in(checkout), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.name}-{page.blocks.start}")
def test_the_commands_of_a_page_run(checkout: Path, page: Page):
    text = (ROOT / "docs" / page.name).read_text()
    for old, new in page.filled.items():
        assert old in text, f"{old!r} is no longer in {page.name}"
        text = text.replace(old, new)
    script = "\n".join(block.script for block in read_blocks(text)[page.blocks])
    for kind, content in re.findall(r"^```(python|json|yaml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        name = NAMES.get((page.name, kind))
        if name and not (checkout / name).exists():
            (checkout / name).write_text(content)
    run(checkout, f"{page.before}\n{script}")


NAMES = {
    ("fleet.md", "yaml"): "seeds.yaml", ("hyperparameter-search.md", "json"): "space.json",
    ("own-model-and-data.md", "python"): "digits.py", ("own-model-and-data.md", "yaml"): "own.yaml",
}  # fmt: skip
"""The files that pages show, by language; the first of a page counts."""
