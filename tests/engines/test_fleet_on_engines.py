"""A fleet of jobs under one budget on each engine."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from harness.engines.machines import ROOT, missing, open_machines, variables
from harness.own_models import OWN_MODELS
from harness.waiting import until
from tests.e2e.fleet_story import FleetShell, tell
from trainer.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "ray"])
def test_a_fleet_is_paused_killed_and_gone_on_with_within_its_budget(kind: str, tmp_path: Path) -> None:
    if why := missing(kind):
        pytest.skip(why)
    with open_machines(kind) as machines:
        home = tmp_path / "home"
        own = {
            "DTRAIN_HOME": str(home),
            "DTRAIN_CLUSTER": kind,
            "DTRAIN_CLUSTER_NAME": "engine",
            "DTRAIN_FACTORY_MODULES": "paced",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{OWN_MODELS}",
        }
        environment = os.environ | variables(kind, machines.options(tmp_path)) | own
        jobs = home / "storage" / "jobs"
        tell(FleetShell(tmp_path, home, environment, str(jobs)))
        for folder in jobs.iterdir():
            launch = RunDir(str(folder)).read_json("launch.json") or {}
            assert all(job.state == "ended" for job in machines.jobs(launch)), folder.name
        until(lambda: not _processes(str(jobs)), lambda: _processes(str(jobs)), pause=0.1)


def _processes(words: str) -> list[psutil.Process]:
    """What runs on this machine with these words in its command line."""
    found = psutil.process_iter(["cmdline", "status"])
    return [
        process
        for process in found
        if process.info["status"] != psutil.STATUS_ZOMBIE and words in " ".join(process.info["cmdline"] or [])
    ]
