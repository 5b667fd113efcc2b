"""The examples of the reference of commands are run, section by section, in one home with small tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT
from tests.docs.checkout import make_checkout
from tests.docs.page import Page, run_in

DOCUMENT = "docs/reference/commands.md"
FILES = r"""
cat > tables.py <<'EOF'
import pandas as pd
pd.DataFrame({"size": [20 + n % 80 for n in range(400)], "price": [50.0 + 3 * (n % 80) for n in range(400)]}
             ).to_parquet("houses.parquet")
pd.DataFrame({"visit_id": range(400), "customer": [f"c{n % 40}" for n in range(400)],
              "age": [20 + n % 50 if n % 7 else None for n in range(400)],
              "bought": ["yes" if n % 3 else "no" for n in range(400)]}).to_parquet("visits.parquet")
EOF
cat > my_models.py <<'EOF'
from torch import nn
def make_model(spec, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(spec.window * len(spec.features), outputs))
EOF
cat > my_script.py <<'EOF'
import os
print("rank", os.environ["RANK"])
EOF
cat > my_training.py <<'EOF'
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainer import DistributedConfig, Trainer
width = int(sys.argv[sys.argv.index("--width") + 1])
inputs = torch.arange(64.0)[:, None] / 64
data = TensorDataset(inputs, inputs * 2)
model = nn.Sequential(nn.Linear(1, width), nn.Linear(width, 1))
Trainer(model, DistributedConfig(epochs=1)).fit(data)
EOF
cat > night.yaml <<'EOF'
name: night
budget_usd: 20
nodes: 2
defaults: {dataset: latest, epochs: 1}
jobs: [{name: one}, {name: two}]
EOF
echo '{"training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": true}}' > space.json
echo Date,MeterCategory,CostInBillingCurrency,BillingCurrency,ResourceId > export.csv; gzip export.csv
python tables.py
"""
SETTINGS = "export DTRAIN_NODES=2 DTRAIN_THREADS_PER_RANK=1 DTRAIN_FACTORY_MODULES=my_models"
PRICES_JOB = """make run SELECT=stock_prices,sharded_dataset
dtrain train --dataset latest --set training.max_steps=20 --name first
python - <<'EOF'
import json
first = json.load(open(".dtrain/storage/jobs/first/job.json"))
again = {"job_id": "again", **{part: first[part] for part in ("dataset", "model", "loss", "training")}}
json.dump(again, open("job.json", "w"))
EOF"""
FRAMEWORKS = "needs another framework; tests/frameworks runs it"
RUNNING = """dtrain train --dataset latest --name long --epochs 100000 --detach
until dtrain status long | grep 'training · step'; do sleep 1; done"""


def number_of(command: str) -> int:
    """Return the number of the block of examples in the section of a command."""
    before = re.search(rf".*?^## {re.escape(command)}\n", (ROOT / DOCUMENT).read_text(), re.M | re.S)
    assert before, f"{DOCUMENT} has no section {command}"
    return len(re.findall(r"^```sh\n", before[0], re.MULTILINE))


def section(command: str, before: str = "", filled: Mapping[str, str] | None = None, **more: Any) -> Page:
    """Return the examples of a command as blocks to run."""
    number = number_of(command)
    return Page(DOCUMENT, before, filled or {}, slice(number, number + 1), **more)


PAGES = [
    section("dtrain init"),
    section("dtrain doctor"),
    section("dtrain tune", PRICES_JOB, {
        "--nodes 3": "--nodes 2 --seconds 60", "--seconds 600": "--seconds 60",
        "train --config job.json --settings": "train --config job.json --name tuned --settings"},
        after="test -s tuned.json"),
    section("dtrain train", filled={
        "train --dataset latest": "train --set training.max_steps=20 --dataset latest",
        "--config job.json --nodes 2 --procs": "--config job.json --name given --nodes 2 --procs"}, left_out={
        "dtrain train --set training.max_steps=20 --dataset latest --nodes 3 --backend horovod": FRAMEWORKS}),
    section("dtrain data"),
    section("dtrain search", filled={"--trials 40": "--trials 2", "--nodes 8": "--nodes 2 --trials 2"}),
    section("dtrain jobs"),
    section("dtrain status", filled={"dtrain status\n": "dtrain status mine\n", "train-6f66": "mine"},
            after="test -s training.html", left_out={
        "dtrain status --lift gpu-17": "no host is excluded; cli/test_nodes.py lifts one"}),
    section("dtrain logs"),
    section("dtrain cost", left_out={
        "dtrain cost --refresh": "asks Azure; costs/test_prices.py emulates it"}),
    section("dtrain fleet"),
    section("dtrain cancel", RUNNING, {
        "cancel train-20261126-1425": "status long | grep cancelled"}),
    section("dtrain ui", filled={
        "dtrain ui --all\ndtrain ui --port 3001": "dtrain ui --port 0\ndtrain ui --port 0",
        **{f"dtrain ui {page}": f"dtrain ui {page} --port 0" for page in ("jobs", "mlflow")}},
        served=True),
    section("dtrain launch", left_out={
        f"dtrain launch --engine {name}": FRAMEWORKS for name in ("horovod", "deepspeed", "ray")},
        after="dtrain logs night --follow"),
]  # fmt: skip
"""The sections in the order in which they are run: some take what earlier ones have made. After `dtrain launch` the
latest job is no training."""
PARTS = [page.part for page in PAGES]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, with the tables, texts and scripts that the examples name."""
    folder = make_checkout(tmp_path_factory.mktemp("reference") / "dtrain")
    run_in(folder, f"make setup\n{FILES}")
    return folder


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.blocks.start))
def test_the_examples_of_a_command_run(checkout: Path, page: Page) -> None:
    run_in(checkout, f"{SETTINGS}\n{page.script()}")
