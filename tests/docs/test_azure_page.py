"""The commands of the pages on Azure ML are run against the emulated workspace that docs/azure.md starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.azure.azurite import missing
from tests.docs.checkout import make_checkout
from tests.docs.page import Page, run_in

MODEL = """
from torch import nn

def make_model(spec, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(spec.window * len(spec.features), outputs))
"""
DOCTOR = """misses() {  # what the doctor says, which has to miss something
  local code=0; dtrain doctor "$@" >said.txt || code=$?; cat said.txt; test $code = 1
}"""
MISSING = {"\ndtrain doctor": "\nmisses"}
"""The emulated workspace has no subnet, which the doctor misses, with exit code 1."""

PAGES = [
    Page("docs/azure.md", f"{DOCTOR}\nexport DTRAIN_NODES=2 DTRAIN_THREADS_PER_RANK=1", MISSING, slice(1, 2), after=(
        "test $(jobs -r | wc -l) = 1; grep -q '1 missing' said.txt; dtrain jobs --json | grep succeeded")),
    Page("docs/azure.md", "", MISSING, slice(0, 1)),
    Page("deploy/azure/README.md", "", MISSING, slice(0, 1)),
    Page("docs/azure.md", f"cat > my_models.py <<'EOF'{MODEL}EOF\nexport DTRAIN_FACTORY_MODULES=my_models", {
        "--nodes 3 --model my_models:make_model": "--nodes 2 --model my_models:make_model --epochs 1 --name mine",
        "JOB": "mine"}, slice(3, 4)),
    Page("docs/azure.md", "", {}, slice(4, 5)),
]  # fmt: skip
"""In the order in which they are run, in one shell: the first one's exports lead the others to the emulator."""


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_pages_are_followed_against_the_emulator(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    checkout = make_checkout(tmp_path / "dtrain")
    end = "trap 'kill $(jobs -p); wait' EXIT"
    said = run_in(checkout, "\n".join(["make setup", end, *(page.script() for page in PAGES)]))
    assert "champion" in said


PARTS = [page.part for page in PAGES]
"""The blocks that are run here."""
