"""Homes with names that mean something to a shell, SQL, a glob, an address or a log, and watched files beside them.

In each home a small pipeline really runs, by the command line: prices, shards, a training on two nodes, its status. It
works, or is refused at the start with a message that names DTRAIN_HOME. Nothing beside the home is touched.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.abuse.hostile_data import canary, digest_of
from tests.abuse.planted_secrets import BIN, environment_of, small_prices
from tests.abuse.tally import Tally

NASTIEST = ("-rf 'a\"b[1]*#ü::x\\y;$HOME", "a'); COPY (SELECT 1) TO 'canary.txt'; --")
"""Names with most of the odd characters at once."""
USABLE = (
    *NASTIEST, "with blanks  in it", "it's", 'a"quote"', "[1]", "a*b", "{a,b}", "a#b", "ü€漢字", "-dash", "--config=x",
    "a&b|c;d", "$(touch canary.txt)", "`touch canary.txt`", "a::b", "u:p@host", "~", "env:HOME", "a=b,c", "a\\b",
    "..a", ".hidden", "<b>&amp;", "!x", "a\u202eb",
)  # fmt: skip
"""Names with which everything must work."""
REFUSED = ("a?b", "a%41b", "a%b", "a\nb", "a\tb", "a\x1b[31mb", "a\x7fb", "a\udcffb")
"""Names that must be refused."""
BUILD = """
import sys
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.validation import validate_prices
from dtrain_dagster.settings.environment import load_settings
settings = load_settings()
ref = write_prices(price_source(settings.prices), settings.storage_uri)
print(build_dataset(ref, validate_prices(ref), settings.storage_uri, DatasetParams(window=30)).uri)
"""
TRAIN = (
    "train", "--dataset", "latest", "--nodes", "2", "--name", "odd", "--set", "training.max_steps=4",
    "--set", 'model={"factory": "tcn", "args": {"channels": 4}}', "--set", "training.batch_size_per_gpu=64",
)  # fmt: skip


def run(command: tuple[str, ...], environment: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, and return it with its output."""
    return subprocess.run(
        command, env=dict(environment), cwd=folder, text=True, errors="replace", timeout=300, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def pipeline(folder: Path, name: str) -> str:
    """Run everything in the home ``name`` under ``folder``, with the prices in it. Return "" if it worked and nothing
    beside it was touched, else the fault."""
    home, before = folder / name, canary(folder)
    home.mkdir()
    prices = home / "my [prices]'s.csv"
    prices.write_bytes(small_prices())
    environment = environment_of(home, DTRAIN_PRICES=str(prices))
    there = sorted(path.name for path in folder.iterdir())
    dtrain = str(BIN / "dtrain")
    for command in ((sys.executable, "-c", BUILD), (dtrain, *TRAIN), (dtrain, "status", "odd"), (dtrain, "jobs")):
        done = run(command, environment, folder)
        if done.returncode:
            return f"{name!r}: {command[:2]} ended with {done.returncode}: {done.stdout[-1500:]}"
    if "succeeded" not in done.stdout:
        return f"{name!r}: the job is not in the list as one that succeeded: {done.stdout[-500:]}"
    after = sorted(path.name for path in folder.iterdir())
    if after != there or digest_of(folder) != before:
        return f"{name!r}: beside the home there is {sorted(set(after) ^ set(there))}"
    return ""


def refusal(folder: Path, name: str) -> str:
    """Return "" if a home of this name is refused with a message and nothing is made, else the fault."""
    before = canary(folder)
    there = sorted(os.listdir(os.fsencode(folder)))
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("DTRAIN_")}
    done = run((str(BIN / "dtrain"), "jobs"), inherited | {"DTRAIN_HOME": f"{folder}/{name}"}, folder)
    if done.returncode != 2 or "DTRAIN_HOME" not in done.stdout or "Traceback" in done.stdout:
        return f"{name!r}: not refused in words: {done.stdout[-500:]}"
    if any(character in done.stdout for character in "\x1b\x7f"):
        return f"{name!r}: its control characters were printed"
    if sorted(os.listdir(os.fsencode(folder))) != there or digest_of(folder) != before:
        return f"{name!r}: refused, and something was made beside it"
    return ""


def attack(random: random.Random, rounds: int) -> Tally:
    """Try all homes that must be refused, and per ten rounds one of those that must work, the nastiest first."""
    tally = Tally()
    some = [*NASTIEST, *random.sample(USABLE[len(NASTIEST) :], len(USABLE) - len(NASTIEST))][: max(1, rounds // 10)]
    for check, names in ((refusal, REFUSED), (pipeline, some)):
        for name in names:
            with tempfile.TemporaryDirectory(prefix="dtrain-abuse-") as folder:
                tally.tried += 1
                if problem := check(Path(folder), name):
                    tally.outages += "ended with" in problem
                    tally.accepted += "ended with" not in problem
                    tally.findings.append(problem)
    return tally
