"""`dagster asset materialize` as CI uses it: the exit code tells the truth. Exit code 0 is in `test_whole_graph.py`,
and that of a model that does not pass the gate in `test_azure.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import make_project


@pytest.mark.slow
def test_a_mistake_is_one_line_and_its_run_is_in_the_overview(tmp_path: Path):
    project = make_project(tmp_path / "home")
    quiet = {"loggers": {"console": {"config": {"log_level": "INFO"}}}}
    config = quiet | {"ops": {"stock_prices": {"config": {"source": "/nowhere/prices.csv"}}}}
    done = project.cli(
        "dagster",
        *("asset", "materialize", "-m", "dtrain_dagster.definitions", "--select", "stock_prices"),
        *("--config-json", json.dumps(config)),
        PYTHONWARNINGS="default",
    )
    assert done.returncode == 1
    assert "the run has failed at stock_prices: DTRAIN_PRICES='/nowhere/prices.csv' is neither a file" in done.stdout
    assert "Stack Trace" not in done.stdout
    warned = [line for line in done.stdout.splitlines() if "Warning" in line]
    assert [line for line in warned if "SupersessionWarning" not in line] == [], "of Dagster, about its own command"
