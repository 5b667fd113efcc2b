"""A real Dagster instance for end-to-end tests: `dtrain ui` on loopback, driven by GraphQL."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
import requests
from playwright.sync_api import Browser

from dtrain_dagster.definitions import build_defs
from dtrain_dagster.planning.evidence import has_succeeded
from dtrain_dagster.settings.environment import load_settings
from harness.tables import copy_tables
from harness.waiting import until
from tests.page import Page
from trainer.rundir import RunDir

from .chromium import chromium

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
GRAPH = "stock_prices", "sharded_dataset", "cost_estimate", "trained_checkpoint"
LONG = {"ops": {"cost_estimate": {"config": {"epochs": 400}}}}
ENDED = ("SUCCESS", "FAILURE", "CANCELED")
ON_AZURE = {
    "DTRAIN_CLUSTER": "azure_ml",
    "DTRAIN_CLUSTER_NAME": "dtrain",
    "DTRAIN_STORAGE": "az://dtrain",
    "DTRAIN_AZURE_IMAGE": "emulated.azurecr.io/dtrain:1",
}
"""Beside the environment of the emulator."""


PATIENCE = 3.0
"""How many times longer than on an idle machine things may take beside other tests."""


def wait_for(condition: Callable[[], Any], seconds: float, what: str, pause: float = 0.25) -> Any:
    """Poll until the condition gives something true; fail with what was waited for. ``seconds``: on an idle machine."""
    return until(condition, what, seconds * PATIENCE, pause=pause)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def small_prices(folder: Path) -> Path:
    """A CSV of one's own: four tickers and six years of the bundled panel, wide."""
    import pandas as pd

    from dtrain_dagster.data.sources import price_source

    panel = pd.read_csv(price_source("sp500_panel").local_file(folder), parse_dates=["Date"])
    part = panel.loc[panel["Date"].between("2012-01-01", "2017-12-31"), ["Date", "JNJ", "KO", "PG", "XOM"]]
    path = folder / "my_prices.csv"
    part.to_csv(path, index=False)
    return path


@dataclass
class Project:
    """A home folder, an environment, and the command line."""

    home: Path
    env: dict[str, str]

    def cli(self, *arguments: str, timeout: float = 400, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / arguments[0]), *arguments[1:]],
            cwd=ROOT,
            env=self.env | env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )

    def logged(self) -> str:
        """What the latest run said, by Dagster's records. Its console may lose what a step says just before it ends,
        since that goes through a `tail` that is ended with the step."""
        with dg.DagsterInstance.from_config(self.env["DAGSTER_HOME"]) as instance:
            [run] = instance.get_runs(limit=1)
            return "\n".join(entry.user_message for entry in instance.all_logs(run.run_id))

    @property
    def jobs(self) -> Path:
        return self.home / "storage" / "jobs"

    def processes(self) -> list[psutil.Process]:
        """Every process that works on a job of this project."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if any(str(self.jobs) in part for part in process.info["cmdline"] or []):
                found.append(process)
        return found


def passed_gate(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether the model of a graph that `dagster asset materialize` has made passed the gate, which a model of four
    tickers may or may not. The command must have failed by that, and by nothing else, if it did not."""
    verdict = re.search(r"'promotion_gate' on 'registered_model' (passed|did not pass)", done.stdout)
    assert verdict, done.stdout[-6000:]
    if verdict[1] == "passed":
        assert done.returncode == 0, done.stdout[-6000:]
    else:
        assert done.returncode == 1, done.stdout[-6000:]
        assert "1 blocking asset check failed with ERROR severity:\nregistered_model: promotion_gate" in done.stdout
    return verdict[1] == "passed"


def make_project(home: Path, **env: str) -> Project:
    dagster_home = home / "dagster"
    dagster_home.mkdir(parents=True)
    shutil.copy(ROOT / "dagster.yaml", dagster_home)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DTRAIN_", "DAGSTER_"))}
    own = {
        "DTRAIN_HOME": str(home),
        "DAGSTER_HOME": str(dagster_home),
        "DTRAIN_NODES": "2",
        "DTRAIN_THREADS_PER_RANK": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    return Project(home=home, env=inherited | own | env)


@contextmanager
def dashboard_of(project: Project, *options: str, **env: str) -> Iterator[str]:
    """`dtrain ui jobs` of a home as a process of its own, on a free port of loopback; its address."""
    command = [str(BIN / "dtrain"), "ui", "jobs", "--port", "0", *options]
    process = subprocess.Popen(command, cwd=ROOT, env=project.env | env, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        label, _, url = process.stdout.readline().strip().partition(": ")
        assert label == "dashboard", "as the other pages tell theirs"
        yield url
    finally:
        process.terminate()
        assert process.wait(20) is not None


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium for the tests of one file; each opens pages of its own, which share nothing."""
    with chromium() as made:
        yield made


@pytest.fixture(scope="session")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards and their leakage checks: made by the first test that shares them, and found by the others of its
    worker."""
    return tmp_path_factory.mktemp("datasets")


@pytest.fixture(scope="session")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directories of probes, shared in the same way."""
    return tmp_path_factory.mktemp("probes")


def share(home: Path, datasets: Path) -> None:
    """Let a home find datasets that were made before with their leakage checks, and MLflow's tables."""
    (home / "storage").mkdir(parents=True)
    for name in ("datasets", "leakage_checks"):
        (datasets / name).mkdir(exist_ok=True)
        (home / "storage" / name).symlink_to(datasets / name)
    copy_tables(home / "mlflow.db")


def share_probes(home: Path, probes: Path) -> None:
    """Let a home find the probes that were run before: a plan reuses one of the same pace."""
    shutil.copytree(probes, home / "storage" / "jobs", dirs_exist_ok=True)


def keep_probes(home: Path, probes: Path) -> None:
    """Keep the probes of a home for other tests."""
    for folder in (home / "storage" / "jobs").glob("probe-*"):
        if has_succeeded(RunDir(str(folder))) and not (probes / folder.name).exists():
            shutil.copytree(folder, probes / folder.name)


@pytest.fixture
def shared(datasets: Path, tmp_path: Path) -> None:
    """The home of this test has a dataset, if another test has made it."""
    share(tmp_path / "home", datasets)


@pytest.fixture
def probed(shared: None, probes: Path, tmp_path: Path) -> Iterator[None]:
    """The home of this test has a dataset and a probe, if another test has made them."""
    share_probes(tmp_path / "home", probes)
    yield
    keep_probes(tmp_path / "home", probes)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A fresh project on four tickers and two nodes. Whatever it left running is stopped."""
    made = make_project(tmp_path / "home", DTRAIN_PRICES=str(small_prices(tmp_path)))
    yield made
    for process in made.processes():
        process.kill()


@dataclass
class Dagster:
    """A running `dtrain ui`: webserver, daemon and code server, behind the guard."""

    project: Project
    port: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def query(self, text: str, **variables: Any) -> dict[str, Any]:
        answer = requests.post(f"{self.url}/graphql", json={"query": text, "variables": variables}, timeout=30)
        body = answer.json()
        assert "errors" not in body, body["errors"]
        return body["data"]

    def launch(self, *assets: str, config: dict[str, Any] | None = None) -> str:
        """Materialize these assets; the run's id."""
        params = {
            "selector": {
                "repositoryLocationName": "dtrain",
                "repositoryName": "__repository__",
                "pipelineName": "__ASSET_JOB",
                "assetSelection": [{"path": [asset]} for asset in assets],
            },
            "runConfigData": config or {},
            "mode": "default",
        }
        data = self.query(
            "mutation($p: ExecutionParams!) { launchRun(executionParams: $p) { __typename "
            "... on LaunchRunSuccess { run { runId } } ... on PythonError { message } "
            "... on RunConfigValidationInvalid { errors { message } } } }",
            p=params,
        )["launchRun"]
        assert data["__typename"] == "LaunchRunSuccess", data
        return data["run"]["runId"]

    def status(self, run_id: str) -> str:
        text = "query($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"
        return self.query(text, id=run_id)["runOrError"]["status"]

    def worker(self, run_id: str) -> psutil.Process:
        """The process that executes the run, as its log names it."""
        text = (
            "query($id: ID!) { logsForRun(runId: $id) { ... on EventConnection { events { "
            "... on MessageEvent { message } } } } }"
        )
        messages = str(self.query(text, id=run_id))
        return psutil.Process(int(re.findall(r"Executing steps in process \(pid: (\d+)\)", messages)[-1]))

    def terminate(self, run_id: str) -> None:
        self.query("mutation($id: String!) { terminateRun(runId: $id) { __typename } }", id=run_id)

    def materializations(self, asset: str) -> list[dict[str, Any]]:
        text = (
            "query($key: AssetKeyInput!) { assetOrError(assetKey: $key) { ... on Asset { assetMaterializations "
            "{ runId metadataEntries { label ... on TextMetadataEntry { text } } } } } }"
        )
        return self.query(text, key={"path": [asset]})["assetOrError"].get("assetMaterializations", [])

    def observations(self, asset: str) -> list[dict[str, Any]]:
        text = (
            "query($key: AssetKeyInput!) { assetOrError(assetKey: $key) { ... on Asset { assetObservations { runId "
            "metadataEntries { label ... on FloatMetadataEntry { floatValue } "
            "... on IntMetadataEntry { intValue } } } } } }"
        )
        return self.query(text, key={"path": [asset]})["assetOrError"].get("assetObservations", [])


def start_dagster(project: Project) -> Dagster:
    server = Dagster(project=project, port=free_port())
    command = [str(BIN / "dtrain"), "ui", "--port", str(server.port), "--workspace", "workspace.yaml"]
    log = open(project.home / "ui.log", "wb")  # noqa: SIM115 - the process keeps it
    server.processes.append(
        subprocess.Popen(
            command, cwd=ROOT, env=project.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    )

    def ready() -> bool:
        try:
            return requests.get(f"{server.url}/server_info", timeout=2).ok
        except (requests.ConnectionError, requests.Timeout):
            return False

    wait_for(ready, 90, "the webserver")
    return server


def stop_dagster(server: Dagster) -> None:
    for process in server.processes:
        process.terminate()  # it ends its daemon and its code server
    for process in server.processes:
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@pytest.fixture(scope="session")
def dagster(tmp_path_factory: pytest.TempPathFactory, datasets: Path, probes: Path) -> Iterator[Dagster]:
    """Webserver and daemon over a project that several tests work on."""
    folder = tmp_path_factory.mktemp("dagster")
    own = {"DTRAIN_PRICES": str(small_prices(folder)), "DTRAIN_FACTORY_MODULES": "examples.own_model"}
    share(folder / "home", datasets)
    share_probes(folder / "home", probes)
    project = make_project(folder / "home", **own)
    server = start_dagster(project)
    try:
        yield server
    finally:
        stop_dagster(server)
        for process in project.processes():
            process.kill()
        keep_probes(folder / "home", probes)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dg.JobDefinition:
    """The graph in this process, on four tickers and two nodes."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DTRAIN_NODES", "2")
    monkeypatch.setenv("DTRAIN_THREADS_PER_RANK", "1")
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "examples.own_model")
    monkeypatch.setenv("DTRAIN_PRICES", str(small_prices(tmp_path)))
    return build_defs(load_settings()).resolve_implicit_global_asset_job_def()


def run(
    job: dg.JobDefinition, instance: dg.DagsterInstance, selection: Any = None, **options: Any
) -> dg.ExecuteInProcessResult:
    config = {"ops": {"cost_estimate": {"config": options}}}
    selection = selection or whole_graph(job)
    return job.execute_in_process(run_config=config, instance=instance, raise_on_error=False, asset_selection=selection)


def whole_graph(job: dg.JobDefinition) -> list[dg.AssetKey]:
    """All that trains once: no search."""
    return [key for key in job.asset_layer.executable_asset_keys if key.path[0] != "hyperparameter_search"]


def metadata(result: dg.ExecuteInProcessResult, asset: str) -> dict[str, Any]:
    [event] = [event for event in result.get_asset_materialization_events() if event.asset_key == dg.AssetKey(asset)]
    return Page(event.materialization.metadata)


def evaluations(result: dg.ExecuteInProcessResult) -> list[dg.AssetCheckEvaluation]:
    """Of asset checks, in order of time; one that is told while a job runs is judged again at its end."""
    return list(result.get_asset_check_evaluations())


def checks(result: dg.ExecuteInProcessResult) -> dict[str, bool]:
    return {evaluation.check_name: evaluation.passed for evaluation in evaluations(result)}
