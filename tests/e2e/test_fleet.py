"""A fleet of real trainings by `dtrain fleet`: killed and gone on with; its nodes keep the budget with nobody there."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain_dagster.clusters.managers import LocalClusterManager
from harness.small_job import write_dataset
from tests.e2e.fleet_story import PRICE, ROOT, FleetShell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[FleetShell]:
    write_dataset(tmp_path / "dataset")
    home = tmp_path / "home"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("DTRAIN_")},
        "DTRAIN_HOME": str(home),
        "PYTHONPATH": str(ROOT),
    }
    yield FleetShell(tmp_path, home, environment, str(home / "storage" / "jobs"))
    LocalClusterManager(home).cleanup_cluster()


@pytest.mark.long
def test_nodes_keep_the_budget_with_the_orchestrator_dead_and_the_fleet_goes_on_where_it_was(shell: FleetShell):
    budget = 240 * PRICE
    jobs = [{"name": "a", "priority": 1}, {"name": "b"}]
    shell.write(budget, jobs, **{"training.epochs": 100_000})  # far more than was expected of them
    orchestrator = shell.start("fleet", "fleet.yaml")
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
        kept = shell.kept(name)
        limit = (shell.rundir(name).read_json("budget.json") or {})["max_node_seconds"]
        promised = kept["grant_units"] / 3.6e18
        assert node.seconds(0.0) * PRICE <= promised <= budget
        assert node.seconds(0.0) - limit < 20, "within the margin"
    seen = shell.status()
    assert not seen["is_run"]
    assert seen["promised_usd"] <= budget

    said = shell.run("fleet", "fleet.yaml")
    seen = shell.status()
    assert seen["over"] == 2, said
    assert {job["state"] for job in seen["jobs"]} == {"ended"}, said
    assert all("not continued: it would cost" in job["why"] for job in seen["jobs"]), said
    assert seen["used_usd"] <= budget
    cost = shell.ask("cost", "small")
    paid = sum(node.seconds(0.0) for name in "ab" for node in shell.rundir(name).nodes())
    assert cost["node_seconds"] == pytest.approx(paid, abs=1e-4), "every node-second is in the ledger"
    assert cost["usd"] == pytest.approx(seen["used_usd"], abs=1e-9)
    assert cost["usd"] <= budget


@pytest.mark.long
def test_a_fleet_goes_on_after_a_kill_and_buys_nothing_twice(shell: FleetShell):
    low = {"name": "low", "nodes": 2, "set": {"training.epochs": 100_000}}
    high = {"name": "high", "priority": 1, "nodes": 2, "set": {"training.max_steps": 6}}
    shell.write(10_000.0, [low], 60.0)
    orchestrator = shell.start("fleet", "fleet.yaml")
    while not list(shell.rundir("low").events("step")):
        assert orchestrator.poll() is None, orchestrator.communicate()[0]
        time.sleep(0.5)
    orchestrator.send_signal(signal.SIGKILL)
    orchestrator.wait()

    shell.write(10_000.0, [low, high], 60.0)
    again = shell.start("fleet", "fleet.yaml")
    while len(shell.status()["jobs"]) < 2:
        assert again.poll() is None, again.communicate()[0]
        time.sleep(0.5)
    seen = {job["job_id"]: job for job in shell.status()["jobs"]}
    assert (seen["small-low"]["state"], seen["small-high"]["why"]) == ("running", "waits: no node is free")
    shell.run("cancel", "small-low")
    again.wait()
    seen = {job["job_id"]: job for job in shell.status()["jobs"]}
    assert (seen["small-low"]["state"], seen["small-high"]["state"]) == ("ended", "succeeded")
    nodes = {name: shell.rundir(name).nodes() for name in ("low", "high")}
    assert {node.exit_codes for node in nodes["low"]} == {(143,)}, "asked to leave, not at its limit"
    assert [(node.launch, node.incarnation) for name in nodes for node in nodes[name]] == [(1, 1)] * 4, "bought once"
    ends = [node.ended_at or 0.0 for node in nodes["low"]]
    assert max(ends) <= min(node.started_at for node in nodes["high"]), "never four nodes at once"

    same = {"nodes": 2, "expected_node_minutes": None}
    known = [
        {"name": f"steps-{steps}", **same, "set": {"training.max_steps": steps, "training.epochs": 100_000}}
        for steps in (6, 60_000)
    ]
    shell.write(10_000.0, [*known, {"name": "new", "expected_node_minutes": None}, {"name": "told"}])
    said = shell.run("fleet", "fleet.yaml", "--check")
    figures = dict(re.split(r" on \d nodes?: ", line, maxsplit=1) for line in said.splitlines() if " on " in line)
    assert figures["small-new: 30 min 00 s"].startswith("a first guess: no past run of the same model, data and batch")
    assert figures["small-told: 30 s"] == "given"
    told = {name.split(": ")[0]: (name, why) for name, why in figures.items()}
    assert (
        told["small-steps-6"][1]
        == told["small-steps-60000"][1]
        == ("1 past run(s) at the same pace, the latest small-high")
    )
    assert "min" not in told["small-steps-6"][0], "what it took"
    assert "min" in told["small-steps-60000"][0], "of so many more steps"
