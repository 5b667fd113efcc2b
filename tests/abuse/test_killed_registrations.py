"""A registration that was killed at any moment, or is asked for three times at once, makes one version.

It has its digests, loads and is champion; until then the champion is the one before. The registry is a real SQLite file
of MLflow. One job is registered and champion from the start; another one, which has an MLflow run of its own training,
is to take its place. All that MLflow does is done in forks, since it keeps connections to a file that is replaced here.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtrain_dagster.jobs.orders import MODEL_DIGESTS, keep_order, keep_registration, order_of
from dtrain_dagster.jobs.progress import REGISTRATION
from dtrain_dagster.registry.local import MLflowRegistry
from dtrain_dagster.registry.promotion import AliasDecision
from dtrain_dagster.registry.smoke_test import Candidate
from dtrain_dagster.registry.versions import PACKED_TAG, open_client
from harness import small_job
from harness.tables import copy_tables
from tests.abuse.killed import in_fork
from trainer.rundir import RunDir

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
NAME = "forecaster"
FIRST, SECOND = "train-00000000-first", "train-00000000-second"


class Home:
    """A home with a registry and two finished jobs, as it is copied back before each kill."""

    def __init__(self, folder: Path) -> None:
        for name in ("pyfunc", "store.model_registry.sqlalchemy_store", "store.tracking.sqlalchemy_store"):
            importlib.import_module(f"mlflow.{name}")  # for the forks; it takes seconds
        self.folder, self.good = folder / "home", folder / "good"
        self.uri = f"sqlite:///{self.folder}/mlflow.db"
        self.folder.mkdir()
        copy_tables(self.folder / "mlflow.db")  # else half of the steps that are counted would be those of making them
        dataset = small_job.write_dataset(folder / "dataset")
        for steps, job in enumerate((FIRST, SECOND), start=3):
            small_job.train(self.folder, dataset, job, steps=steps)
            keep_order(self.folder, self.rundir(job).read_job(), None)
        in_fork(lambda: self.register(FIRST), self.folder)
        in_fork(self.track, self.folder)
        self.folder.rename(self.good)

    def rundir(self, job: str) -> RunDir:
        return RunDir(str(self.folder / "jobs" / job))

    def again(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.good, self.folder)

    def track(self) -> None:
        """Make a run of MLflow for the second job, as if its training had reported to it."""
        client = open_client(self.uri)
        experiment = client.get_experiment_by_name("dtrain")
        run = client.create_run(experiment.experiment_id, run_name=SECOND, tags={"job_id": SECOND})
        self.rundir(SECOND).write_json("tracking.json", {"mlflow_run_id": run.info.run_id})

    def register(self, job: str) -> bool:
        """Register a job as the asset ``registered_model`` does; return whether that made a version."""
        rundir, models = self.rundir(job), MLflowRegistry(self.uri)
        order = order_of(self.folder, rundir)
        model = models.register_model(
            Candidate(rundir.uri, order, os.environ["DTRAIN_CACHE"]), NAME, {"nodes": "1"}, "# card"
        )
        digests = {name: model.tags[name] for name in (*MODEL_DIGESTS, PACKED_TAG)}
        keep_registration(self.folder, job, {"name": model.name, "version": model.version, **digests})
        models.promote(model, AliasDecision(alias="champion", reason="it is better"))
        rundir.write_json(REGISTRATION, {"name": model.name, "version": model.version, "alias": "champion"})
        return model.created

    def champion(self) -> str:
        """Return the job whose model is champion; raise if its files are not those that were registered."""
        version = open_client(self.uri).get_model_version_by_alias(NAME, "champion")
        with MLflowRegistry(self.uri).files(NAME, version.version):
            return str(version.tags["job_id"])

    def check(self) -> None:
        """Check that the second job has one version and one run, which are what was trained, and is champion."""
        import mlflow.pyfunc

        client, rundir = open_client(self.uri), self.rundir(SECOND)
        versions = {item.version: dict(item.tags) for item in client.search_model_versions(f"name = '{NAME}'")}
        [mine] = [number for number, tags in versions.items() if tags.get("job_id") == SECOND]
        assert len(versions) == 2
        experiments = [item.experiment_id for item in client.search_experiments()]
        [run] = client.search_runs(experiments, f"tags.job_id = '{SECOND}'")
        found, order = client.get_model_version(NAME, mine), order_of(self.folder, rundir)
        assert found.run_id == run.info.run_id == (rundir.read_json("tracking.json") or {})["mlflow_run_id"]
        digests = [
            hashlib.sha256((self.folder / "jobs" / SECOND / "model" / name).read_bytes()).hexdigest()
            for name in ("model.json", "weights.pt")
        ]
        assert order is not None
        assert order.registered["version"] == str(found.version)
        for facts in (found.tags, order.registered):
            assert [facts.get(name) for name in MODEL_DIGESTS] == digests
            assert facts.get(PACKED_TAG) == found.tags[PACKED_TAG]
        assert self.champion() == SECOND
        assert "challenger" not in client.get_registered_model(NAME).aliases
        for number in versions:
            with MLflowRegistry(self.uri).files(NAME, number) as files:  # raises where they differ
                model = mlflow.pyfunc.load_model(str(files))
                shape = [1 if size < 0 else size for size in model.metadata.signature.inputs.inputs[0].shape]
                assert np.isfinite(model.predict(np.zeros(shape, np.float32)).to_numpy()).all()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("registry")
    os.environ["DTRAIN_CACHE"] = str(folder / "cache")
    return Home(folder)


@pytest.fixture(autouse=True)
def _same_cache(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_CACHE", str(home.good.parent / "cache"))
    home.again()


def test_one_that_was_killed_at_any_step_is_done_again(home: Home) -> None:
    def do_again() -> None:
        assert home.champion() in (FIRST, SECOND)
        home.register(SECOND)
        home.check()

    _, steps = in_fork(lambda: home.register(SECOND), home.folder)
    for kill_at in range(2, steps, max(1, steps // 5)):
        home.again()
        in_fork(lambda: home.register(SECOND), home.folder, kill_at)
        in_fork(do_again, home.folder)


def test_three_at_once_make_one_version_and_other_weights_another(home: Home) -> None:
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(in_fork, lambda: home.register(SECOND), home.folder) for _ in range(3)]
        assert sorted(each.result()[0] for each in asked) == [False, False, True]
    in_fork(home.check, home.folder)
    rundir = home.rundir(SECOND)
    rundir.write_json("result.json", (rundir.read_json("result.json") or {}) | {"weights_sha256": "0" * 64})
    job = rundir.read_job()
    keep_order(home.folder, replace(job), None)  # it was begun anew under the same name
    assert in_fork(lambda: home.register(SECOND), home.folder)[0]
