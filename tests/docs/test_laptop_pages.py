"""The commands of the pages that need no more than a laptop are run, block by block.

What a page leaves to its reader (a job's name, a table, a number of trials that takes hours) is filled in here. Pages
that take the `latest` dataset of prices come before those that make other ones.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.checkout import make_checkout
from tests.docs.page import Page, run_in

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


SCRIPT = """
import os, sys
assert sys.argv[1:] == ["--epochs", "3"] and os.environ["WORLD_SIZE"] == "4"
"""
PRICES = """
import pandas as pd
from dtrain_dagster.data.sources import price_source
panel = pd.read_csv(price_source("sp500_panel").local_file("."), parse_dates=["Date"])
part = panel.loc[panel["Date"].dt.year.between(2012, 2017), ["Date", "JNJ", "KO", "PG", "XOM"]]
part.to_csv("prices.csv", index=False)
"""
BILLED = "echo Date,MeterCategory,CostInBillingCurrency,BillingCurrency,ResourceId > usage.csv"
"""An export of Azure in which nothing was billed, as nothing is here."""
SERVED = """python -m http.server --bind 127.0.0.1 0 > served.txt 2>&1 & trap "kill $!" EXIT
until PORT=$(grep -oEm1 'port [0-9]+' served.txt | cut -d' ' -f2); do sleep 0.2; done"""
DATA_ONLY = "export SELECT='stock_prices,sharded_dataset'"
"""What a user may set for a part of the graph: what comes after the data is not these pages' matter."""
SMALL = "epochs: 1, more: {max_steps: 20}"
THIS_SUITE = "runs the tests that this one belongs to"
MEASURED = {"tune --dataset latest --nodes 3": "tune --dataset latest --nodes 2 --seconds 60"}
OWN = "docs/own-model-and-data.md"

PAGES = [
    Page("CONTRIBUTING.md", "git init --quiet .", left_out={
        name: THIS_SUITE for name in ("make test", "make kube", "make slurm", "make ray")}),
    Page("README.md", left_out={"make test": THIS_SUITE},
         after="test -e .dtrain/mlflow.db && dtrain jobs --json | grep succeeded"),
    Page("docs/monitoring.md", "dtrain train --dataset latest --nodes 2 --set training.max_steps=5", {
        "```sh server\ndtrain ui jobs": "```sh server\ndtrain ui jobs --port 0"}, after="complete -p dtrain"),
    Page("docs/costs.md", f"dtrain train --dataset latest --nodes 2 --epochs 1 --name JOB\n{BILLED}", left_out={
        "dtrain cost --refresh": "asks Azure; costs/test_prices.py emulates it"}),
    Page("docs/performance.md", filled={
        **MEASURED, "--nodes 3 --set training.communication": "--nodes 2 --set training.max_steps=20 "
        "--set training.communication", "--nodes 1 2 3": "--nodes 1 2 --node-steps 12"},
         after="ls .dtrain/storage/jobs | grep scaling; grep efficiency_weak scaling.json"),
    Page("docs/own-dagster-project.md", blocks=slice(2, 4), after=(
        "dagster sensor list -w workspace.yaml | grep 'new_data.*RUNNING'\n"
        "dagster schedule list -w workspace.yaml | grep 'weekly_retraining.*RUNNING'")),
    Page("docs/many-trainings.md", filled={
        "epochs: 4": "epochs: 1", "--trials 40 --budget 5":
        "--trials 3 --budget 5 --set training.epochs=1 --name NAME"}),
    Page("docs/installing.md", DATA_ONLY, blocks=slice(0, 1)),
    Page("docs/installing.md", blocks=slice(1, 2), after="test -e my-training/my_training/definitions.py"),
    Page("docs/installing.md", blocks=slice(3, 4)),
    Page("docs/installing.md", blocks=slice(9, 10), after="grep -q ' RANK=0 .* -m trainer ' submitted.txt"),
    Page("docs/own-dagster-project.md", "mkdir ../team; cd ../team", {
        "```sh server\ndtrain ui": "```sh server\ndtrain ui --port 0"}, slice(0, 2)),
    Page("examples/walk_forward/README.md",
         "echo 'resources: {walk: {config: {options: [--set=training.max_steps=20]}}}' > small.yaml", {
             "--partition 2010": "--partition 2010 --config small.yaml"}),
    Page(OWN, filled={"--nodes 3 --set training.shuffle_block": "--nodes 2 --set training.max_steps=20 "
                      "--set training.shuffle_block"}, blocks=slice(8, 9)),
    Page(OWN, "", {"--your-own-arguments": ""}, slice(0, 1)),
    Page(OWN, f"cat > my_script.py <<'EOF'{SCRIPT}EOF", {}, slice(1, 2)),
    Page(OWN, "", {"epochs: 2": "epochs: 1"}, slice(6, 8)),
    Page(OWN, f"{DATA_ONLY}\npython - <<'EOF'{PRICES}EOF\n{SERVED}", {
        "'https://account.blob.core.windows.net/prices/p.csv?sv=…&sig=…'": "http://127.0.0.1:$PORT/prices.csv?sig=s"},
        slice(2, 4)),
    Page(OWN, f"python - <<'EOF'{VISITS}EOF", {}, slice(4, 5)),
    Page(OWN, f"cat > my_data.py <<'EOF'{MODEL}EOF\ncp my_data.py my_model.py", {}, slice(5, 6)),
]  # fmt: skip


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, whose home has the prices' dataset."""
    folder = make_checkout(tmp_path_factory.mktemp("pages") / "dtrain")
    select = "dagster asset materialize -m dtrain_dagster.definitions --select stock_prices,sharded_dataset"
    run_in(folder, f"make setup\nexport DAGSTER_HOME=$PWD/.dtrain/dagster\n{select}")
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.document}-{page.blocks.start}")
def test_the_commands_of_a_page_run(checkout: Path, page: Page):
    text = (ROOT / page.document).read_text()
    for kind, content in re.findall(r"^```(python|json|yaml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        name = NAMES.get((Path(page.document).name, kind))
        if name and not (checkout / name).exists():
            (checkout / name).write_text(content)
    run_in(checkout, page.script())


NAMES = {
    ("many-trainings.md", "yaml"): "seeds.yaml", ("many-trainings.md", "json"): "space.json",
    ("own-model-and-data.md", "python"): "digits.py", ("own-model-and-data.md", "yaml"): "own.yaml",
}  # fmt: skip
"""The files that pages show, by language; the first of a page counts."""
