"""Commands with `--json` on a home in which things really ran: each field that is printed is told, and each that is
told was printed."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from price_list import listing, price_list
from told_json import TOLD, fields_in, printed

from dtrain_dagster.cli.main import main
from harness.small_job import write_dataset
from harness.tables import copy_tables

FIELDS = ("model.args.channels=4", "training.warmup_steps=1", "training.checkpoint_frequency=4")
SMALL = tuple(word for field in FIELDS for word in ("--set", field))
SPACE = {"training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}}
NOT_HERE = {
    "dtrain cost": ("reconciliation",),
    "dtrain status": ("registered.", "nodes[].", "excluded_hosts"),
}
"""Words → how fields begin that this home does not have: a bill of a provider, SLURM, a registered
model, a host that is excluded."""


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == code, done.output
    return done.stdout


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Any]]]:
    """Words of a command → what it printed, in a home with a training of two launches, a fleet and a search."""
    folder = tmp_path_factory.mktemp("json")
    copy_tables(folder / "home" / "mlflow.db")
    write_dataset(folder / "walks")
    (folder / "space.json").write_text(json.dumps(SPACE))
    fleet = {
        "name": "few", "budget_usd": 5.0, "nodes": 1, "defaults": {"dataset": "walks", "model": "tcn"},
        "jobs": [{"name": "a", "set": {"model.args.channels": 4, "training.max_steps": 6, "training.warmup_steps": 1}}],
    }  # fmt: skip
    (folder / "few.yaml").write_text(yaml.safe_dump(fleet))
    found: dict[str, list[Any]] = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch, price_list() as listed:
        for name in [name for name in os.environ if name.startswith("DTRAIN_")]:
            patch.delenv(name)
        for name, value in {"HOME": str(folder / "home"), "NODES": "1", "THREADS_PER_RANK": "1"}.items():
            patch.setenv(f"DTRAIN_{name}", value)
        patch.chdir(folder)
        words = "train --dataset walks --model tcn --name one --set training.max_steps=9"
        asked = (*words.split(), *SMALL)
        run(*asked, "--set", "training.max_node_seconds=0.01", code=77)
        run(*asked)

        def note(words: str, arguments: str = "", code: int = 0) -> None:
            found[words].append(printed(words, arguments, code))

        run("fleet", "few.yaml")
        size = " ".join((*SMALL, "--set", "training.max_steps=6", "--set", "training.gradient_accumulation_steps=1"))
        search = f"--dataset walks --model tcn --space space.json --trials 2 --sampler random --name wide {size}"
        note("dtrain search", f"{search} --plan")
        note("dtrain search", search)
        for words in ("jobs", "jobs --fleets", "search --show wide", "cost", "cost one", "cost few"):
            note(f"dtrain {words.partition(' ')[0]}", words.partition(" ")[2])
        for words, name in (("status", "one"), ("status", "few"), ("logs", "one")):
            note(f"dtrain {words}", name)
        listed.items = listing("Standard_NC6s_v3", 3.5)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("dtrain_dagster.cli.cost.RETAIL_URL", listed.url)
            note("dtrain cost", "--refresh --sku Standard_NC6s_v3")
        yield found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_is_printed_is_what_is_told(documents: dict[str, list[Any]]) -> None:
    untold, unprinted = {}, {}
    for words, documents_of_command in documents.items():
        found, told = fields_in(words, documents_of_command), set(TOLD[words])
        untold[words] = found - told
        unprinted[words] = {name for name in told - found if not name.startswith(NOT_HERE.get(words, ("-",)))}
    assert not any(untold.values()), untold
    assert not any(unprinted.values()), unprinted
