"""The whole graph with the strategy of another framework: probed, estimated, trained, billed, registered and served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, make_project, passed_gate, small_prices
from tests.frameworks.shell import needs
from trainer.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("strategy", [pytest.param(name, marks=needs(name)) for name in ("horovod", "deepspeed")])
def test_prices_become_a_registered_model(strategy: str, tmp_path: Path) -> None:
    prices = str(small_prices(tmp_path))
    project = make_project(tmp_path / "home", DTRAIN_PRICES=prices, PYTHONPATH=str(ROOT))
    options = {"strategy": strategy, "epochs": 2, "checkpoint_frequency": 50, "warmup_steps": 3}
    config = json.dumps({"ops": {"cost_estimate": {"config": options}}})
    done = project.cli(
        "python", "-m", "dagster", "asset", "materialize", "-m", "dtrain_dagster.definitions", "--select",
        "not group:studies", "--config-json", config, timeout=800,
    )  # fmt: skip
    passed_gate(done)
    assert "'serving_endpoint_answers' on 'registered_model' passed" in done.stdout
    [folder] = project.jobs.glob("train-*")
    [probe] = project.jobs.glob("probe-*")
    for each in (folder, probe):
        assert RunDir(str(each)).read_job().training.strategy == strategy
    rundir = RunDir(str(folder))
    assert (rundir.read_json("status.json") or {})["state"] == "succeeded"
    plan, cost = rundir.read_json("plan.json") or {}, rundir.read_json("reports/cost_breakdown.json") or {}
    assert plan["estimate"]["usd"]["expected"] > 0
    assert "measured: a probe" in done.stdout
    assert cost["probe_usd"] > 0
    assert cost["training_usd"] > 0
    assert not [one for one in project.processes() if "trainer" in " ".join(one.cmdline())]
