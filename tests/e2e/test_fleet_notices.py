"""People are told once how each job of a fleet has ended, also of one that ends while the orchestrator is dead."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.managers import LocalClusterManager
from harness.small_job import write_dataset
from harness.waiting import until
from tests.e2e.fleet_story import PACED_MODEL, ROOT, FleetShell
from tests.webhook import web_hook

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[FleetShell]:
    write_dataset(tmp_path / "dataset")
    (tmp_path / "slow_models.py").write_text(PACED_MODEL)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("DTRAIN_")},
        "DTRAIN_HOME": str(tmp_path / "home"),
        "DTRAIN_FACTORY_MODULES": "slow_models",
        "DTRAIN_OPTIONS": "dashboard_url=https://runs.example/dtrain",
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
    }
    yield FleetShell(tmp_path, tmp_path / "home", environment, str(tmp_path / "home" / "storage" / "jobs"))
    LocalClusterManager(tmp_path / "home").cleanup_cluster()


def job(name: str, priority: int, steps: int, pause_seconds: float, **arguments: Any) -> dict[str, Any]:
    return {
        "name": name, "priority": priority, "model": "slow_models:paced",
        "set": {
            "training.max_steps": steps, "training.epochs": 1000, "training.warmup_steps": 1,
            "model.args": {"channels": 4, "pause_seconds": pause_seconds, **arguments},
        },
    }  # fmt: skip


def test_each_job_is_told_once_with_its_page_whoever_dies(shell: FleetShell) -> None:
    with web_hook() as (address, heard):
        shell = replace(shell, environment={**shell.environment, "DTRAIN_NOTIFY": address})
        shell.write(
            10_000.0,
            [job("short", 2, 120, 0.2), job("long", 2, 240, 0.2), job("bad", 1, 400, 0.0, fails_after=60)],
            2.0,
        )
        shell.run_until(lambda: all(list(shell.rundir(name).events("step")) for name in ("short", "long")))
        assert heard == [], "nothing has ended"
        until(lambda: heard, "the notice of a job that ended without an orchestrator", 200)
        assert [item["title"] for item in heard] == ["dtrain: small-short has finished"]
        said = shell.run("fleet", "fleet.yaml")
        until(lambda: len(heard) >= 3, "the notices of all jobs", 200)
        shell.run("fleet", "fleet.yaml")  # all is over: there is nothing to tell
        shell.status()
    titles = Counter(item["title"] for item in heard)
    ends = {"short": "finished", "long": "finished", "bad": "failed"}
    assert titles == {f"dtrain: small-{name} has {end}": 1 for name, end in ends.items()}, said
    for name, end in ends.items():
        [notice] = [item for item in heard if item["title"] == f"dtrain: small-{name} has {end}"]
        assert f"https://runs.example/dtrain/jobs/small-{name}" in notice["message"].splitlines()
        assert f"dtrain logs small-{name}" in notice["message"]
    [failed] = [item["message"] for item in heard if "failed" in item["title"]]
    assert "this model fails on purpose" in failed
