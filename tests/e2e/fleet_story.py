"""A fleet of real trainings by `dtrain fleet`, told once for every kind of cluster: the orchestrator is killed twice,
nodes stop by themselves at what they were promised, one of higher priority comes first, and all jobs end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain_dagster.costs.prices import price_of
from harness.small_job import write_dataset
from trainer.documents.presences import NodePresence
from trainer.rundir import RunDir

ROOT = Path(__file__).parents[2]
PRICE = price_of("Standard_NC6s_v3").usd_per_hour("dedicated") / 3600
"""Dollars of a node-second."""
DTRAIN = (sys.executable, "-P", "-c", "from dtrain_dagster.cli.main import main; main()")
WAIT_SECONDS = 200.0
NAME = "small"

PACED_MODEL = """
import os
import time
from trainer.model.stock import tcn

def paced(spec, outputs, pause_seconds=0.0, fails_after=None, channels=4):
    model, calls = tcn(spec, outputs, channels), []
    def before(module, inputs):
        if module.training and "RANK" in os.environ:
            calls.append(1)
            time.sleep(pause_seconds)
            if fails_after is not None and len(calls) > fails_after:
                raise RuntimeError("this model fails on purpose")
    model.register_forward_pre_hook(before)
    return model
"""
"""Code of a model whose steps take a time of their own, and which fails when it is told to."""


@dataclass(frozen=True)
class FleetShell:
    """A home with one fleet, and `dtrain` in it."""

    folder: Path
    home: Path
    environment: Mapping[str, str]
    jobs_uri: str
    """The address of the run directories."""

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `dtrain`; without MLflow unless the environment says otherwise, since seconds of nodes are counted."""
        environment = {"DTRAIN_OPTIONS": "command_tracking=off", **self.environment}
        return subprocess.Popen(
            [*DTRAIN, *arguments], env=environment, cwd=self.folder, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *arguments: str) -> str:
        return self.start(*arguments).communicate()[0]

    def ask(self, *arguments: str) -> Any:
        """What a command prints as JSON."""
        done = subprocess.run(
            [*DTRAIN, *arguments, "--json"], env=dict(self.environment), cwd=self.folder, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return json.loads(done.stdout)

    def status(self) -> dict[str, Any]:
        return dict(self.ask("status", NAME))

    def rundir(self, name: str) -> RunDir:
        return RunDir(f"{self.jobs_uri}/{NAME}-{name}")

    def kept(self, name: str) -> dict[str, Any]:
        """How a job stands, as the orchestrator remembers it."""
        return json.loads((self.home / "fleets" / NAME / "states" / f"{NAME}-{name}.json").read_text())

    def price(self, name: str) -> float:
        """Dollars of a node-second of a job; in the cloud its nodes may be of another size than the usual one."""
        launch = self.rundir(name).read_json("launch.json") or {}
        return price_of(launch.get("sku", "Standard_NC6s_v3")).usd_per_hour("dedicated") / 3600

    def write(self, budget_usd: float, jobs: list[dict[str, Any]], minutes: float = 0.5, **settings: Any) -> None:
        """Write the file of the fleet. ``minutes``: what its jobs are expected to take."""
        document = {
            "name": NAME,
            "budget_usd": budget_usd,
            "nodes": 2,
            "margin_seconds": 20,
            "defaults": {
                "dataset": str(self.folder / "dataset"),
                "expected_node_minutes": minutes,
                "set": {"training.threads_per_rank": 1, "training.log_frequency": 5, **settings},
            },
            "jobs": jobs,
        }
        (self.folder / "fleet.yaml").write_text(yaml.safe_dump(document))

    def run_until(self, holds: Callable[[], object]) -> None:
        """Run the fleet until this holds, and kill the orchestrator."""
        orchestrator = self.start("fleet", "fleet.yaml")
        try:
            deadline = time.monotonic() + WAIT_SECONDS
            while not holds():
                assert orchestrator.poll() is None, orchestrator.communicate()[0]
                if time.monotonic() > deadline:
                    orchestrator.kill()
                    pytest.fail(f"waited in vain\n{orchestrator.communicate()[0]}")
                time.sleep(0.3)
        finally:
            orchestrator.kill()
            orchestrator.communicate()


def tell(shell: FleetShell) -> dict[str, list[NodePresence]]:
    """Play the story, and return the nodes of each job. The model ``paced:tcn`` must be found by the nodes."""
    write_dataset(shell.folder / "dataset")
    budget = 1_500 * PRICE
    pace = {"model": "paced:tcn", "startup_seconds": 5}
    both = {"nodes": 2, **pace}
    low = {"name": "low", **both, "set": _steps(400, 0.15)}
    high = {"name": "high", "priority": 1, **both, "set": _steps(380, 0.15)}
    side = {"name": "side", **pace, "set": _steps(10, 0.0)}

    shell.write(budget, [low], 1.0)  # less than it takes: killed before the job tells, it stops at what it was promised
    shell.run_until(shell.rundir("low").nodes)
    _wait_for_budget(shell, "low")
    shell.write(budget, [low, high, side], 1.0)
    shell.run_until(shell.rundir("high").nodes)
    _wait_for_budget(shell, "high")
    stopped = [node.seconds(node.last_seen_at or node.started_at) for node in shell.rundir("high").nodes()]
    promised = {name: shell.kept(name)["grant_units"] / 3.6e18 for name in ("low", "high")}
    assert sum(stopped) * shell.price("high") <= promised["high"]
    assert sum(promised.values()) <= budget

    said = shell.run("fleet", "fleet.yaml")
    seen = shell.status()
    assert {job["job_id"]: job["state"] for job in seen["jobs"]} == {
        f"{NAME}-{name}": "succeeded" for name in ("low", "high", "side")
    }, said
    nodes = {name: shell.rundir(name).nodes() for name in ("low", "high", "side")}
    assert [(node.launch, node.incarnation) for node in nodes["low"]] == [(1, 1)] * 2 + [(2, 1)] * 2, said
    assert [(node.launch, node.incarnation) for node in nodes["high"]] == [(1, 1)] * 2 + [(2, 1)] * 2, said
    assert [(node.launch, node.incarnation) for node in nodes["side"]] == [(1, 1)], said
    for name, steps in (("low", 400), ("high", 380), ("side", 10)):
        assert (shell.rundir(name).read_result() or {})["steps"] == steps
    for name in ("low", "high"):
        assert [event["step"] > 0 for event in shell.rundir(name).events("resume")], "from its checkpoint"
    together = [node for each in nodes.values() for node in each]
    starts = [node.started_at for node in together]
    assert max(sum(node.started_at <= at < (node.ended_at or 0.0) for node in together) for at in starts) <= 2

    cost = shell.ask("cost", NAME)
    assert cost["node_seconds"] == pytest.approx(sum(node.seconds(0.0) for node in together), abs=1e-4)
    priced = sum(node.seconds(0.0) * shell.price(name) for name, each in nodes.items() for node in each)
    assert cost["usd"] == pytest.approx(priced, abs=1e-6)
    assert cost["usd"] == pytest.approx(seen["used_usd"], abs=1e-9), "what the fleet counts is what the ledgers sum to"
    assert seen["used_usd"] == seen["promised_usd"] <= budget, "what was not used has come back"
    return nodes


def _wait_for_budget(shell: FleetShell, name: str) -> None:
    """Wait until the nodes of a job have stopped by themselves."""
    deadline, rundir = time.monotonic() + WAIT_SECONDS, shell.rundir(name)
    while not rundir.read_json("result.json"):
        assert time.monotonic() < deadline, "nobody told its nodes to stop"
        time.sleep(0.3)
    assert (rundir.read_json("result.json") or {})["status"] == "budget"
    assert rundir.latest_checkpoint()


def _steps(steps: int, pause_seconds: float) -> dict[str, Any]:
    """Settings of a training of so many steps, with a pause in each."""
    return {
        "training.max_steps": steps, "training.epochs": 1000, "training.warmup_steps": 5,
        "training.batch_size_per_gpu": 64,
        "model.args": {"pause_seconds": pause_seconds},
    }  # fmt: skip
