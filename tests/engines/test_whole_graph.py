"""The whole graph on each engine, from prices to a registered model, as CI runs it: `dagster asset materialize`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from harness.engines.machines import missing, open_machines, variables
from tests.e2e.conftest import ROOT, make_project, passed_gate, small_prices
from trainer.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "ray"])
def test_prices_become_a_registered_model(kind: str, tmp_path: Path) -> None:
    if why := missing(kind):
        pytest.skip(why)
    with open_machines(kind) as machines:
        project = make_project(
            tmp_path / "home",
            **variables(kind, machines.options(tmp_path)),
            DTRAIN_CLUSTER=kind,
            DTRAIN_CLUSTER_NAME="engine",
            DTRAIN_PRICES=str(small_prices(tmp_path)),
            PYTHONPATH=str(ROOT),
            **{name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SLURM_CONF") if name in os.environ},
        )
        options = {"epochs": 2, "checkpoint_frequency": 50, "warmup_steps": 3}
        config = json.dumps({"ops": {"cost_estimate": {"config": options}}})
        done = project.cli(
            "dagster", "asset", "materialize", "-m", "dtrain_dagster.definitions", "--select", "not group:studies",
            "--config-json", config, timeout=500,
        )  # fmt: skip
        passed_gate(done)
        assert "'serving_endpoint_answers' on 'registered_model' passed" in done.stdout
        [folder] = project.jobs.glob("train-*")
        rundir = RunDir(str(folder))
        assert (rundir.read_json("status.json") or {})["state"] == "succeeded"
        assert (rundir.read_json("launch.json") or {})["engine"] == kind
        assert {node.node_id for node in rundir.nodes()} == {0, 1}
        assert all(node.host for node in rundir.nodes())
        assert "stock-return-distribution" in project.cli("dtrain", "status").stdout
        assert not [one for one in project.processes() if "trainer.node" in " ".join(one.cmdline())]
