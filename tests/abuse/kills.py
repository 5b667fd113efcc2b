"""Kill processes at seeded moments of work that must not be left half-done, and repeat the work.

Repeated, it must succeed and have one result. Each kind of work is a small program of its own (`WORK`), so that ``kill
-9`` meets a real process.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tests.abuse.tally import Tally

ROOT = Path(__file__).parents[2]
TABLES = """
import sys
import mlflow.store.tracking.sqlalchemy_store
from mlflow import MlflowClient
from trainer.observability.mlflow_sqlite import make_tables
print("go", flush=True)
uri = f"sqlite:///{sys.argv[1]}/mlflow.db"
make_tables(uri)
client = MlflowClient(tracking_uri=uri)
found = client.get_experiment_by_name("kills")
experiment = found.experiment_id if found else client.create_experiment("kills")
if not client.search_runs([experiment]):
    client.create_run(experiment)
"""
SHARDS = """
import sys
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.validation import validate_prices
import numpy, pandas, pyarrow.parquet, duckdb
print("go", flush=True)
days, walks = pandas.bdate_range("2000-01-03", periods=3000), numpy.random.default_rng(0).normal(0, 0.01, (3000, 5))
file = sys.argv[1] + "/prices.csv"
pandas.DataFrame(numpy.exp(walks.cumsum(0)), columns=list("ABCDE")).assign(date=days).to_csv(file, index=False)
prices = write_prices(price_source(file), sys.argv[1])
build_dataset(prices, validate_prices(prices, "none"), sys.argv[1], DatasetParams(window=20, horizon=2), "none")
"""
PROVISION = """
import sys
import time
from pathlib import Path
from dtrain_dagster.clusters.base import JobSpec
from dtrain_dagster.clusters.managers import LocalClusterManager
print("go", flush=True)
home = Path(sys.argv[1])
manager = LocalClusterManager(home)
manager.provision_cluster(1, "Standard_NC6s_v3")
manager.submit_job(JobSpec(job_id="one", command=("sh", "-c", "echo once >> '%s/ran'" % home), node_count=1,
                           processes_per_node=1, run_dir=str(home / "storage" / "jobs" / "one"), env={}))
while not manager.job_status("one").state.is_final:
    time.sleep(0.1)
"""


def killed(program: str, folder: Path, seconds: float | None) -> int:
    """Run a program on a folder, kill it ``seconds`` after it has printed «go» (None: do not kill it), and return its
    exit code."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        cwd=ROOT,
        env={**os.environ, "DTRAIN_HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    process.stdout.readline()
    if seconds is not None:
        time.sleep(seconds)
        process.kill()
    process.stdout.read()
    return process.wait()


def duration(program: str, folder: Path) -> float:
    """Return the seconds of a program from «go» to its end; raise ValueError if it fails though it was not killed."""
    folder.mkdir()
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        cwd=ROOT,
        env={**os.environ, "DTRAIN_HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()
    _, said = process.communicate()
    if process.returncode:
        raise ValueError(f"it fails by itself: {said.decode(errors='replace')[-500:]}")
    return time.monotonic() - began


def wrong_tables(folder: Path) -> str:
    """Return "" if there is one experiment of this campaign with one run, else the fault."""
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        [(experiments,)] = database.execute("SELECT count(*) FROM experiments WHERE name = 'kills'")
        [(runs,)] = database.execute("SELECT count(*) FROM runs")
    left = list(folder.glob("mlflow.db.new-*"))
    return "" if (experiments, runs, left) == (1, 1, []) else f"{experiments} experiments, {runs} runs, left: {left}"


def wrong_shards(folder: Path) -> str:
    """Return "" if there is one complete dataset and, after their time, no leftovers of killed builders; else the
    fault."""
    from dtrain_dagster.data.build_once import verify_shards
    from dtrain_dagster.support.building import LEFT_SECONDS, sweep_leftovers

    for parent in (folder / "prices", folder / "datasets"):
        for left in parent.glob("building-*"):
            os.utime(left, (time.time() - 2 * LEFT_SECONDS,) * 2)
        sweep_leftovers(parent)
    names = sorted(path.name for parent in ("prices", "datasets") for path in (folder / parent).iterdir())
    if len(names) != 2:
        return f"there are {names}"
    [dataset] = (folder / "datasets").iterdir()
    verify_shards(str(dataset))
    return ""


def wrong_job(folder: Path) -> str:
    """Return "" if the job ran and is the only one, else the fault. Its supervisor lives on when the submitter is
    killed."""
    ran = (folder / "ran").read_text().count("once")
    jobs = [path.name for path in (folder / "storage" / "jobs").iterdir()]
    return "" if ran >= 1 and jobs == ["one"] else f"ran {ran} times, jobs {jobs}"


WORK: dict[str, tuple[str, Callable[[Path], str]]] = {
    "tables": (TABLES, wrong_tables),
    "shards": (SHARDS, wrong_shards),
    "provision": (PROVISION, wrong_job),
}
"""Kinds of work: program, and the check of its result."""


def attack(random: random.Random, rounds: int, only: str | None = None) -> Tally:
    """Kill each kind of work ``rounds`` times, at most twice in one folder, and then finish it."""
    tally = Tally()
    for name, (program, wrong) in WORK.items():
        if only not in (None, name):
            continue
        with tempfile.TemporaryDirectory(prefix="dtrain-abuse-") as scratch:
            whole = duration(program, Path(scratch) / "first")
            for number in range(rounds):
                folder = Path(scratch) / str(number)
                folder.mkdir()
                moments = [random.uniform(0.0, whole) for _ in range(random.choice((1, 1, 2)))]
                for moment in moments:
                    killed(program, folder, moment)
                tally.tried += 1
                code = killed(program, folder, None)
                said = f"exit code {code}" if code else wrong(folder)
                if said:
                    tally.outages += 1
                    at = ", ".join(f"{moment:.2f} s" for moment in moments)
                    tally.findings.append(f"{name}, killed after {at} of {whole:.2f} s, then done again: {said}")
                shutil.rmtree(folder, ignore_errors=True)
    return tally
