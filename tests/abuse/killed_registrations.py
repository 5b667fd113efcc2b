"""Kill the process that registers a finished job's model at seeded moments and steps, and register again.

Then there must be one version of the job, with its digests, that loads and is champion; until then the champion is the
one before. The registry is a real SQLite file of MLflow. One job is registered and champion from the start; another
one, which may have an MLflow run of its own training, is to take its place.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.abuse.forks import Forks
from tests.abuse.tally import Tally

NAME = "forecaster"
FIRST, ALONE, TRACKED = "train-00000000-first", "train-00000000-alone", "train-00000000-tracked"
"""Ids of the jobs. TRACKED has reported to a run of MLflow while it was trained."""


def warm() -> None:
    """Import the modules that registration needs."""
    for name in (
        "mlflow.artifacts", "mlflow.pyfunc", "mlflow.store.model_registry.sqlalchemy_store",
        "mlflow.store.tracking.sqlalchemy_store", "dtrain_dagster.registry", "trainer.engine.trainer",
        "trainer.model.mlflow_model",
    ):  # fmt: skip
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def _uri(folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db"


def prepare(folder: Path) -> None:
    """Train the jobs, and keep their orders."""
    from dtrain_dagster.jobs.orders import keep_order
    from harness import small_job
    from harness.tables import copy_tables
    from trainer.rundir import RunDir

    copy_tables(folder / "mlflow.db")  # else half of the steps that are counted would be those of making them
    dataset = small_job.write_dataset(folder / "dataset")
    os.environ["DTRAIN_CACHE"] = str(folder / "cache")
    for steps, job in enumerate((FIRST, ALONE), start=3):
        small_job.train(folder, dataset, job, steps=steps)
    shutil.copytree(folder / "jobs" / ALONE, folder / "jobs" / TRACKED)
    for job in (FIRST, ALONE, TRACKED):
        rundir = RunDir(str(folder / "jobs" / job))
        rundir.write_job(replace(rundir.read_job(), job_id=job, run_dir=rundir.uri))
        keep_order(folder, rundir.read_job(), None)


def track(folder: Path) -> None:
    """Make a run of MLflow for the job, as if its training had reported to it."""
    from dtrain_dagster.registry.versions import open_client
    from trainer.rundir import RunDir

    client = open_client(_uri(folder))
    experiment = client.get_experiment_by_name("dtrain")
    run = client.create_run(experiment.experiment_id, run_name=TRACKED, tags={"job_id": TRACKED})
    RunDir(str(folder / "jobs" / TRACKED)).write_json("tracking.json", {"mlflow_run_id": run.info.run_id})


def register(folder: Path, job: str) -> str:
    """Register a job as the asset ``registered_model`` does; return the version."""
    from dtrain_dagster.jobs.orders import MODEL_DIGESTS, keep_registration, order_of
    from dtrain_dagster.jobs.progress import REGISTRATION
    from dtrain_dagster.registry import PACKED_TAG, AliasDecision, MLflowRegistry
    from trainer.rundir import RunDir

    rundir = RunDir(str(folder / "jobs" / job))
    models = MLflowRegistry(_uri(folder))
    model = models.register_model(
        rundir.uri, NAME, {"nodes": "1"}, "# card", cache_dir=str(folder / "cache"), order=order_of(folder, rundir)
    )
    digests = {name: model.tags[name] for name in (*MODEL_DIGESTS, PACKED_TAG)}
    keep_registration(folder, job, {"name": model.name, "version": model.version, **digests})
    models.promote(model, AliasDecision(alias="champion", reason="it is better"))
    rundir.write_json(REGISTRATION, {"name": model.name, "version": model.version, "alias": "champion"})
    return model.version


def champion(folder: Path) -> str:
    """Return the job whose model is champion; raise if its files are not those that were registered."""
    from dtrain_dagster.registry import MLflowRegistry
    from dtrain_dagster.registry.versions import open_client

    version = open_client(_uri(folder)).get_model_version_by_alias(NAME, "champion")
    with MLflowRegistry(_uri(folder)).files(NAME, version.version):
        return str(version.tags["job_id"])


def wrong(folder: Path, job: str) -> str:
    """Return the faults of a registration that was finished; empty for none."""
    import mlflow.pyfunc
    import numpy as np

    from dtrain_dagster.jobs.orders import MODEL_DIGESTS, order_of
    from dtrain_dagster.registry import PACKED_TAG, MLflowRegistry
    from dtrain_dagster.registry.versions import open_client
    from trainer.rundir import RunDir

    client, rundir = open_client(_uri(folder)), RunDir(str(folder / "jobs" / job))
    versions = {item.version: dict(item.tags) for item in client.search_model_versions(f"name = '{NAME}'")}
    mine = [number for number, tags in versions.items() if tags.get("job_id") == job]
    if len(mine) != 1 or len(versions) != 2:
        return f"there are {len(versions)} versions, of this job {len(mine)}"
    experiments = [item.experiment_id for item in client.search_experiments()]
    runs = client.search_runs(experiments, f"tags.job_id = '{job}'")
    said = [f"{len(runs)} runs of MLflow are of the job"] if len(runs) != 1 else []
    found = client.get_model_version(NAME, mine[0])
    traced = (rundir.read_json("tracking.json") or {}).get("mlflow_run_id", found.run_id)
    if found.run_id != traced:
        said.append("the version does not belong to the run of its training")
    digests = [
        hashlib.sha256((folder / "jobs" / job / "model" / name).read_bytes()).hexdigest()
        for name in ("model.json", "weights.pt")
    ]
    order = order_of(folder, rundir)
    assert order is not None
    for where, facts in (("version", found.tags), ("order", order.registered)):
        if [facts.get(name) for name in MODEL_DIGESTS] != digests or facts.get(PACKED_TAG) != found.tags[PACKED_TAG]:
            said.append(f"the {where} says other digests")
    if order.registered.get("version") != str(found.version):
        said.append("the order names another version")
    if champion(folder) != job or "challenger" in client.get_registered_model(NAME).aliases:
        said.append(f"the champion is of {champion(folder)}")
    for number in versions:
        with MLflowRegistry(_uri(folder)).files(NAME, number) as files:  # raises where they differ
            model = mlflow.pyfunc.load_model(str(files))
            shape = [1 if size < 0 else size for size in model.metadata.signature.inputs.inputs[0].shape]
            if not np.isfinite(model.predict(np.zeros(shape, np.float32)).to_numpy()).all():
                said.append(f"version {number} gives no numbers")
    return "; ".join(said)


def attack(random: random.Random, rounds: int) -> Tally:
    """Make ``rounds`` registrations, kill each once or twice, and then finish it."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="dtrain-abuse-") as scratch, Forks(__name__) as forks:
        home, good = Path(scratch) / "home", Path(scratch) / "good"
        home.mkdir()
        _refuse(forks.run("prepare", home))
        whole = _refuse(forks.run("register", home, job=FIRST))
        _refuse(forks.run("track", home))
        home.rename(good)  # copied back for each round: the addresses in the database are those of ``home``
        for _ in range(rounds):
            job = random.choice((ALONE, TRACKED))
            shutil.copytree(good, home)
            said, at = [], list[str]()
            for _ in range(random.choice((1, 1, 2))):
                when: dict[str, Any] = {"seconds": random.uniform(0.0, whole["seconds"])}
                if random.random() < 0.6:
                    when = {"step": random.randint(1, whole["steps"])}
                at.append(" ".join(f"{name} {value:.4g}" for name, value in when.items()))
                found = forks.run("register", home, job=job, **when)
                said += [f"{name} outlives it" for name in found["orphans"]]
                now = forks.run("champion", home)
                if now.get("gave") not in (FIRST, job):
                    said.append(f"there is no champion between: {now.get('error')}")
            tally.tried += 1
            again = forks.run("register", home, job=job)
            said += [again["error"]] if again["code"] else []
            said += [str(judged) for judged in [_judged(forks.run("wrong", home, job=job))] if judged]
            if said:
                tally.outages += 1
                tally.findings.append(f"{job}, killed at {', '.join(at)}, then done again: {'; '.join(said)}")
            shutil.rmtree(home)
    return tally


def _judged(found: dict[str, Any]) -> str:
    return str(found.get("gave", found.get("error", f"exit code {found['code']}")))


def _refuse(found: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a fork; raise ValueError if it failed though it was not killed."""
    if found["code"]:
        raise ValueError(f"it fails by itself: {found.get('error', found['code'])}")
    return found
