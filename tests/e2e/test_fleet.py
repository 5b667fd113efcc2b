"""A fleet of real trainings by `dtrain fleet`: killed and gone on with; its nodes keep the budget with nobody there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain_dagster.clusters.local.manager import LocalClusterManager
from dtrain_dagster.costs.prices import price_of
from tests.dtrain_dagster.small_job import write_dataset
from trainer.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
PRICE = price_of("Standard_NC6s_v3").usd_per_hour("dedicated") / 3600
"""Dollars of a node-second."""
DTRAIN = (sys.executable, "-P", "-c", "from dtrain_dagster.cli.main import main; main()")


class Shell:
    """A home, and `dtrain` in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("DTRAIN_")},
            "DTRAIN_HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*DTRAIN, *arguments], env=self.environment, cwd=self.folder, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *arguments: str) -> str:
        return self.start(*arguments).communicate()[0]

    def status(self) -> dict[str, Any]:
        return json.loads(self.run("fleet", "status", "small", "--json"))

    def rundir(self, name: str) -> RunDir:
        return RunDir(str(self.home / "storage" / "jobs" / f"small-{name}"))


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    write_dataset(tmp_path / "dataset")
    made = Shell(tmp_path)
    yield made
    LocalClusterManager(made.home).cleanup_cluster()


def write_fleet(shell: Shell, budget_usd: float, jobs: list[dict[str, Any]], **settings: Any) -> None:
    document = {
        "name": "small",
        "budget_usd": budget_usd,
        "nodes": 2,
        "margin_seconds": 20,
        "slice_seconds": 20,
        "defaults": {
            "dataset": str(shell.folder / "dataset"),
            "most_nodes": 1,
            "expected_node_minutes": 0.5,
            "set": {"training.threads_per_rank": 1, "training.log_frequency": 5, **settings},
        },
        "jobs": jobs,
    }
    (shell.folder / "fleet.yaml").write_text(yaml.safe_dump(document))


def test_nodes_keep_the_budget_with_the_orchestrator_dead_and_the_fleet_goes_on_where_it_was(shell: Shell):
    budget = 240 * PRICE
    jobs = [{"name": "a", "priority": 1}, {"name": "b"}]
    write_fleet(shell, budget, jobs, **{"training.epochs": 100_000})  # far more than was expected of them
    orchestrator = shell.start("fleet", "run", "fleet.yaml")
    deadline = time.monotonic() + 200
    while not all(list(shell.rundir(name).events("step")) for name in "ab"):
        assert time.monotonic() < deadline, orchestrator.communicate()[0]
        assert orchestrator.poll() is None, orchestrator.communicate()[0]
        time.sleep(0.5)
    orchestrator.send_signal(signal.SIGKILL)
    orchestrator.wait()

    manager = LocalClusterManager(shell.home)
    while manager.active_jobs():
        assert time.monotonic() < deadline
        time.sleep(0.5)
    for name in "ab":
        result = shell.rundir(name).read_json("result.json") or {}
        assert result["status"] == "budget", "nobody told them to stop"
        assert shell.rundir(name).latest_checkpoint()
        [node] = shell.rundir(name).nodes()
        kept = json.loads((shell.home / "fleets/small/states" / f"small-{name}.json").read_text())
        limit = (shell.rundir(name).read_json("budget.json") or {})["max_node_seconds"]
        promised = kept["grant_units"] / 3.6e18
        assert node.seconds(0.0) * PRICE <= promised <= budget
        assert node.seconds(0.0) - limit < 20, "within the margin"
    seen = shell.status()
    assert not seen["is_run"]
    assert seen["promised_usd"] <= budget

    said = shell.run("fleet", "run", "fleet.yaml")
    seen = shell.status()
    assert seen["over"] == 2, said
    assert {job["state"] for job in seen["jobs"]} == {"ended"}, said
    assert all("not continued: it would cost" in job["reason"] for job in seen["jobs"]), said
    assert seen["used_usd"] <= budget
    cost = json.loads(shell.run("fleet", "cost", "small", "--json"))
    paid = sum(node.seconds(0.0) for name in "ab" for node in shell.rundir(name).nodes())
    assert cost["node_seconds"] == pytest.approx(paid, abs=1e-4), "every node-second is in the ledger"
    assert cost["usd"] == pytest.approx(seen["used_usd"], abs=1e-9)
    assert cost["usd"] <= budget


def test_a_fleet_goes_on_after_a_kill_and_a_job_of_higher_priority_pauses_the_one_that_runs(shell: Shell):
    low = {"name": "low", "least_nodes": 2, "most_nodes": 2, "set": {"training.epochs": 100_000}}
    high = {"name": "high", "priority": 1, "least_nodes": 2, "most_nodes": 2, "set": {"training.max_steps": 6}}
    write_fleet(shell, 10_000.0, jobs=[low])
    orchestrator = shell.start("fleet", "run", "fleet.yaml")
    while not list(shell.rundir("low").events("step")):
        assert orchestrator.poll() is None, orchestrator.communicate()[0]
        time.sleep(0.5)
    orchestrator.send_signal(signal.SIGKILL)
    orchestrator.wait()

    write_fleet(shell, 10_000.0, jobs=[low, high])
    again = shell.start("fleet", "run", "fleet.yaml")
    while not list(shell.rundir("low").events("resume")):
        assert again.poll() is None, again.communicate()[0]
        time.sleep(0.5)
    seen = {job["job_id"]: job for job in shell.status()["jobs"]}
    assert (seen["small-low"]["state"], seen["small-high"]["state"]) == ("running", "succeeded")
    shell.run("fleet", "cancel", "small")
    again.wait()
    seen = {job["job_id"]: job for job in shell.status()["jobs"]}
    assert (seen["small-low"]["state"], seen["small-high"]["state"]) == ("ended", "succeeded")
    nodes = {name: shell.rundir(name).nodes() for name in ("low", "high")}
    assert [(node.launch, node.incarnation) for node in nodes["high"]] == [(1, 1)] * 2, "bought once"
    assert [(node.launch, node.incarnation) for node in nodes["low"]] == [(1, 1)] * 2 + [(2, 1)] * 2
    assert all(event["step"] > 0 for event in shell.rundir("low").events("resume")), "from its checkpoint"
    ends = [node.ended_at or 0.0 for node in nodes["low"][:2]]
    assert max(ends) <= min(node.started_at for node in nodes["high"]), "never four nodes at once"
