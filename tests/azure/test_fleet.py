"""A fleet of jobs under one budget on an emulated workspace."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from harness.engines.machines import ROOT
from harness.own_models import OWN_MODELS
from tests.azure.shell import JOBS, Shell
from tests.e2e.fleet_story import FleetShell, tell

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def test_a_fleet_is_paused_killed_and_gone_on_with_within_its_budget(shell: Shell, tmp_path: Path) -> None:
    shutil.copy(OWN_MODELS / "paced.py", shell.folder)  # it is sent to the nodes
    found = {"PYTHONPATH": os.pathsep.join([shell.env["PYTHONPATH"], str(ROOT)]), "DTRAIN_FACTORY_MODULES": "paced"}
    tell(FleetShell(shell.folder, tmp_path / "home", shell.env | found, JOBS))
    launches = {"small-low-l1", "small-low-l2", "small-high-l1", "small-high-l2", "small-side-l1"}
    assert set(shell.cloud.control("bought")["jobs"]) == launches
    jobs = shell.cloud.control("state")["jobs"]
    assert {jobs[name]["status"] for name in launches} <= {"Completed", "Failed", "Canceled"}
    assert "works on" not in shell("doctor", code=1)
