"""`dagster asset materialize` as CI uses it: the exit code tells the truth. Exit code 0 is in `test_whole_graph.py`."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
import yaml

from .conftest import Project, make_project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def materialize(project: Project, *assets: str, folder: Path, **options: object):
    config = {"ops": {"cost_estimate": {"config": options}}} if options else {}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    selection = ",".join(assets) if assets else "not group:studies"
    module = "dtrain_dagster.definitions"
    command = ("dagster", "asset", "materialize", "-m", module, "--select", selection, "--config", str(path))
    return project.cli(*command, timeout=540)  # a minute on an idle machine, and more beside browsers


@pytest.mark.long  # on the Azure path it is shown each time, by test_azure.py
@pytest.mark.usefixtures("probed")
def test_a_model_that_is_no_better_than_the_baselines_fails_the_ci_job(project: Project, tmp_path: Path):
    """Four steps teach nothing to a model that does not begin as a baseline: the gate must fail, the model must still
    be registered, but never as champion."""
    done = materialize(project, folder=tmp_path, model="tcn", more={"max_steps": 4})
    assert done.returncode == 1, done.stdout[-4000:]
    assert "promotion_gate" in done.stdout
    with sqlite3.connect(project.home / "mlflow.db") as database:
        aliases = {row[0] for row in database.execute("select alias from registered_model_aliases")}
    assert aliases == {"challenger"}

    # what does not depend on the model being good was made all the same
    [job] = project.jobs.glob("train-*")
    assert (job / "reports" / "cost_breakdown.json").exists()
    report = json.loads((job / "reports" / "performance_report.json").read_text())
    assert report["verdict"]
    assert 0 < report["optimization"]["utilization"]["fraction"] <= 1


def test_a_bad_setting_is_named(project: Project):
    done = project.cli(
        "dagster",
        *("asset", "materialize", "-m", "dtrain_dagster.definitions", "--select", "not group:studies"),
        DTRAIN_NODES="three",
    )
    assert done.returncode != 0
    assert "DTRAIN_NODES='three'" in done.stdout


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
