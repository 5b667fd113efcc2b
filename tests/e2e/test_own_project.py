"""A team's own Dagster project: scaffolded by Dagster's tools, with the wheel of this one, and two graphs in it.

One graph is written in Python and trains on the dataset that an asset of the team returns; the other is written in
YAML and trains what a script does. The tests of this module go on from one another: each is a command that a person
gives in the same project.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from harness.small_job import write_dataset

from .chromium import CHROMIUM, chromium, patient_page, shot
from .conftest import ROOT, free_port, wait_for
from .wheel import build_wheel, layered_environment, plain_environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        find_spec("dagster_dg_cli") is None or find_spec("create_dagster") is None,
        reason="the programs dg and create-dagster are not installed: pip install create-dagster dagster-dg-cli",
    ),
]
IN_PYTHON = '''
from pathlib import Path

import dagster as dg

from dtrain_dagster.pipelines import build_training_assets

@dg.asset(group_name="team")
def features() -> str:
    """A dataset that the team makes."""
    return {folder!r}


@dg.definitions
def returns() -> dg.Definitions:
    training = build_training_assets(
        "returns",
        features,
        model="tcn",
        model_args={{"channels": 4}},
        training={{"max_steps": 40, "warmup_steps": 5, "checkpoint_frequency": 20}},
    )
    return dg.Definitions.merge(training, dg.Definitions(assets=[features]))
'''
IN_YAML = {
    "name": "digits",
    "script": "train.py",
    "arguments": ["8"],
    "training": {"learning_rate": 0.02},
    "cluster": {"nodes": 1},
}
SCRIPT = """
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainer import DistributedConfig, Trainer

samples = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
is_positive = (samples.sum(1, keepdim=True) > 0).float()
train, valid, test = (
    TensorDataset(samples[first:last], is_positive[first:last]) for first, last in ((0, 384), (384, 448), (448, 512))
)
width = int(sys.argv[1])
model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))
config = DistributedConfig(epochs=4, batch_size_per_gpu=16, learning_rate=1e-2)
Trainer(model, config, loss=nn.BCEWithLogitsLoss()).fit(train, valid, test)
"""


@dataclass(frozen=True)
class TeamProject:
    """A project of a team, and the environment of its tools."""

    folder: Path
    python: Path
    env: dict[str, str]

    def tool(self, module: str, *arguments: str, at: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command of this module, as its console script does."""
        code = f"import sys; from {module} import main; sys.exit(main())"
        return subprocess.run(
            [str(self.python), "-c", code, *arguments], cwd=at or self.folder, env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1800, check=False,
        )  # fmt: skip

    def dg(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.tool("dagster_dg_cli.cli", *arguments)

    def launch(self, selection: str) -> subprocess.CompletedProcess[str]:
        return self.dg("launch", "--assets", selection)

    def jobs(self) -> set[str]:
        """The kind and the graph of each job's folder, as in ``train-returns``."""
        folders = (Path(self.env["DTRAIN_HOME"]) / "storage" / "jobs").iterdir()
        return {"-".join(folder.name.split("-")[:2]) for folder in folders if folder.name != "plan"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> TeamProject:
    """A scaffolded project in an environment that has the wheel, and sees the packages of this one beside it."""
    root = tmp_path_factory.mktemp("team")
    python = layered_environment(root / "venv", build_wheel(root), root / "team-project" / "src")  # installed in place
    home = root / "home"
    (home / "dagster").mkdir(parents=True)
    shutil.copy(ROOT / "dagster.yaml", home / "dagster")
    own = {
        "DTRAIN_HOME": str(home),
        "DAGSTER_HOME": str(home / "dagster"),
        "DTRAIN_NODES": "2",
        "DTRAIN_THREADS_PER_RANK": "1",
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "DO_NOT_TRACK": "1",
    }
    made = TeamProject(root / "team-project", python, plain_environment() | own)
    done = made.tool("create_dagster.cli", "project", "team-project", "--no-uv-sync", at=root)
    assert done.returncode == 0, done.stdout
    defs = made.folder / "src" / "team_project" / "defs"
    write_dataset(root / "dataset")
    (defs / "returns.py").write_text(IN_PYTHON.format(folder=str(root / "dataset")))
    done = made.dg("scaffold", "defs", "dtrain_dagster.components.TrainingPipeline", "digits")
    assert done.returncode == 0, done.stdout
    written = yaml.safe_load((defs / "digits" / "defs.yaml").read_text())
    assert written["attributes"] == {"name": "digits", "dataset": {"prices": {"source": "sp500_panel"}}}
    (defs / "digits" / "defs.yaml").write_text(yaml.safe_dump(written | {"attributes": IN_YAML}))
    (defs / "digits" / "train.py").write_text(SCRIPT)
    return made


def test_the_wheel_is_what_the_project_uses_and_dg_lists_the_component(project: TeamProject) -> None:
    code = "import dtrain_dagster.dashboard as d, pathlib; print(pathlib.Path(d.__file__).parent)"
    done = subprocess.run(
        [str(project.python), "-c", code],
        env=project.env,
        cwd=project.folder,
        text=True,
        capture_output=True,
        check=True,
    )
    package = Path(done.stdout.strip())
    assert package.is_relative_to(project.python.parents[1])
    assert {"jobs.html", "jobs.js", "job.html", "job.js"} <= {file.name for file in (package / "static").iterdir()}
    done = project.dg("list", "components", "--json")
    assert done.returncode == 0, done.stdout
    assert "dtrain_dagster.components.TrainingPipeline" in done.stdout


def test_the_graph_in_python_is_materialized_after_the_asset_of_the_team(project: TeamProject) -> None:
    team = project.launch("key:features")
    assert team.returncode == 0, team.stdout[-6000:]
    in_python = project.launch('group:returns and not key:"returns/registered_model"')
    assert in_python.returncode == 0, in_python.stdout[-6000:]
    assert {"probe-returns", "train-returns"} <= project.jobs()


def test_the_graph_in_yaml_is_materialized(project: TeamProject) -> None:
    in_yaml = project.launch("group:digits")
    assert in_yaml.returncode == 0, in_yaml.stdout[-6000:]
    assert {"probe-digits", "train-digits"} <= project.jobs()


def test_a_model_is_registered_under_the_name_of_its_graph(project: TeamProject) -> None:
    project.launch('key:"returns/registered_model"')  # whether a model of 40 steps passes the gate is not the point
    code = (
        "import json; from mlflow import MlflowClient; from dtrain_dagster.settings.environment import load_settings\n"
        "client = MlflowClient(load_settings().tracking_uri)\n"
        "print(json.dumps([[m.name for m in client.search_registered_models()], "
        "[e.name for e in client.search_experiments()]]))"
    )
    done = subprocess.run(
        [str(project.python), "-c", code], env=project.env, text=True, capture_output=True, check=True
    )
    models, experiments = json.loads(done.stdout.splitlines()[-1])
    assert models == ["returns"]
    assert {"returns", "digits"} <= set(experiments)


@dataclass(frozen=True)
class Server:
    """`dg dev` over the project."""

    url: str

    def query(self, text: str, **variables: Any) -> dict[str, Any]:
        body = requests.post(f"{self.url}/graphql", json={"query": text, "variables": variables}, timeout=60).json()
        assert "errors" not in body, body["errors"]
        return body["data"]

    def ticks(self, sensor: str) -> list[dict[str, Any]]:
        """The finished ticks of a sensor."""
        text = (
            "query($s: SensorSelector!) { sensorOrError(sensorSelector: $s) { ... on Sensor { sensorState "
            "{ ticks(limit: 5) { status skipReason error { message } } } } } }"
        )
        selector = {
            "repositoryName": "__repository__", "repositoryLocationName": "team-project", "sensorName": sensor
        }  # fmt: skip
        found = self.query(text, s=selector)["sensorOrError"]["sensorState"]["ticks"]
        return [tick for tick in found if tick["status"] != "STARTED"]


@pytest.fixture(scope="module")
def server(project: TeamProject) -> Iterator[Server]:
    port = free_port()
    code = "import sys; from dagster_dg_cli.cli import main; sys.exit(main())"
    command = [str(project.python), "-c", code, "dev", "--port", str(port)]

    def heed_signals() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    with open(project.folder.parent / "dev.log", "wb") as log:
        process = subprocess.Popen(
            command, cwd=project.folder, env=project.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=heed_signals,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return requests.get(f"{url}/server_info", timeout=5).ok
        except (requests.ConnectionError, requests.Timeout):
            return False

    try:
        wait_for(ready, 120, "the webserver of dg dev")
        yield Server(url)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: install the package chromium")
def test_lineage_is_seen_in_a_browser_and_one_sensor_watches_the_cluster(server: Server) -> None:
    with chromium() as browser:
        page = patient_page(browser, viewport={"width": 1600, "height": 900})
        for report, above in (
            ("returns/registered_model", ("features", "sharded_dataset", "cost_estimate", "trained_checkpoint")),
            ("digits/performance_report", ("cost_estimate", "trained_checkpoint", "gpu_cluster")),
        ):
            page.goto(f"{server.url}/assets/{report}?view=lineage&lineageScope=upstream&lineageDepth=5")
            for asset in (*above, report.rpartition("/")[2]):
                page.get_by_text(asset, exact=True).first.wait_for()
            time.sleep(2)
            shot(page, f"own-project-{report.partition('/')[0]}")
        page.goto(f"{server.url}/asset-groups")
        page.get_by_text("returns", exact=True).first.wait_for()
        shot(page, "own-project-graph")
        page.goto(f"{server.url}/assets/digits/trained_checkpoint")
        page.get_by_text("is not registered", exact=False).first.wait_for()
        shot(page, "own-project-checkpoint")
    first = wait_for(lambda: server.ticks("digits_idle_cluster"), 120, "a tick of the sensor that watches")
    other = wait_for(lambda: server.ticks("returns_idle_cluster"), 120, "a tick of the other graph's sensor")
    assert not [tick["error"] for tick in (*first, *other) if tick["error"]]
    assert "watched by the sensor of another graph" in other[0]["skipReason"]
    assert "another graph" not in (first[0]["skipReason"] or "")
