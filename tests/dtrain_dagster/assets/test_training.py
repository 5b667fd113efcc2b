"""What becomes of a job that has succeeded when something goes wrong with whoever takes it over."""

from __future__ import annotations

import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import dagster as dg
import pytest

from dtrain_dagster.assets.cluster_run import ClusterRun
from dtrain_dagster.assets.pipeline import STOCK
from dtrain_dagster.assets.training import build_trained_checkpoint, hand_over_budget
from dtrain_dagster.assets.training_progress import TOLD
from dtrain_dagster.clusters.base import ClusterConfig, ClusterError
from dtrain_dagster.costs.estimate import Estimate, Interval, Work
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.jobs.progress import CLAIM
from dtrain_dagster.jobs.spending import jobs_noted_since
from dtrain_dagster.jobs.totals import cost_of
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.job_lock import acquire
from tests.dtrain_dagster.told_events import told, write_run
from tests.page import Page
from trainer.data.coverage import digest_of_all
from trainer.documents.presences import NodePresence
from trainer.rundir import EVALUATION, LIMIT, RESULT, STATUS, RunDir, event

trained_checkpoint = build_trained_checkpoint(STOCK)

MARK = "0a1b2c3d"
RANGE = Interval(low=1.0, expected=1.0, high=1.0)
EVALUATED: dict[str, Any] = {"model": {"mse": 1.0}, "baselines": {}, "notes": []}


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    """Of a job that has succeeded and that nobody has taken over, with a straggler that people are to be told of."""
    found = write_run(tmp_path / "storage" / "jobs", f"train-{MARK}-22222222", told(12), "succeeded")
    result = {
        "steps": 60, "epochs": 1, "train_seconds": 12.0, "world_size": 3, "weights_sha256": "ab",
        "weights_equal_on_ranks": True, "consumed": [{"epoch": 0, "samples": 9, "digest": digest_of_all(9)}],
    }  # fmt: skip
    found.write_json(RESULT, result)
    found.write_json(EVALUATION, EVALUATED)
    return found


def plan_in(home: Path) -> TrainingPlan:
    return TrainingPlan(
        fingerprint=MARK,
        job={"dataset": {"uri": str(home), "dataset_id": "cd"}, "training": {"gradient_accumulation_steps": 2}},
        sku="Standard_NC6s_v3",
        tier="dedicated",
        node_count=1,
        processes_per_node=1,
        work=Work(steps=60, evaluations=1, checkpoints=1),
        estimate=Estimate(seconds=RANGE, usd=RANGE, usd_per_node_hour=3.06, node_count=1),
        basis="",
        price_note="",
    )


def adopt(home: Path, stop_at_usd: float = 0.0) -> tuple[dg.ExecuteInProcessResult, list[str]]:
    """Materialize `trained_checkpoint` as a run does whose training another one has begun; with its warnings."""
    (home / "manifest.json").write_text(json.dumps({"samples": {"train": 9}}))
    plan = replace(plan_in(home), stop_at_usd=stop_at_usd)

    @dg.asset
    def cost_estimate() -> TrainingPlan:
        return plan

    resources = build_resources(Settings(home=home))
    with dg.DagsterInstance.ephemeral() as instance:
        found = dg.materialize(
            [cost_estimate, trained_checkpoint],
            instance=instance,
            resources={**resources, "io_manager": dg.mem_io_manager},
            raise_on_error=False,
        )
        records = instance.all_logs(found.run_id)
    return found, [record.user_message for record in records if record.level == logging.WARNING]


@pytest.mark.slow
def test_a_job_is_claimed_once_nothing_can_fail_any_more(tmp_path: Path, rundir: RunDir):
    rundir.write_json(EVALUATION, {"model": {"mse": 1.0}, "notes": []})
    assert not adopt(tmp_path)[0].success, "there is something to fail"
    assert rundir.read_json(CLAIM) is None, "else the next run would train it a second time"
    rundir.write_json(EVALUATION, EVALUATED)
    assert adopt(tmp_path)[0].success
    assert rundir.read_json(CLAIM) is not None


def test_what_a_job_took_is_told_of_all_its_launches(tmp_path: Path, rundir: RunDir):
    began = rundir.nodes()[0].started_at
    for node in range(3):
        rundir.write_node(NodePresence(node_id=node, launch=1, started_at=began, ended_at=began + 470))
        rundir.write_node(
            NodePresence(node_id=node, launch=2, started_at=began + 9000, ended_at=began + 9000 + 132, exit_codes=(0,))
        )
    told_of = [(1, "training", 200.0), (2, "startup", 9.0), (2, "training", 12.0)]
    rundir.append_events(
        1, 0, 9, [event("phase", 0, launch, name=name, seconds=seconds) for launch, name, seconds in told_of]
    )
    found, _ = adopt(tmp_path)
    [made] = found.get_asset_materialization_events()[1:]
    said = Page(made.materialization.metadata)
    assert (said["launches"], said["wall_seconds"]) == (2, 602.0)
    assert said["node_hours"] == pytest.approx(3 * 602 / 3600, abs=1e-5)
    assert said["train_seconds"] == 212.0, "the result has the last launch's 12 s"


def test_a_job_that_runs_is_given_the_budget_of_the_run_that_attaches_to_it(tmp_path: Path, rundir: RunDir):
    status, held = rundir.read_json(STATUS) or {}, acquire(Path(rundir.uri))  # as a supervisor does
    assert held is not None
    rundir.write_json(STATUS, status | {"state": "running"})

    def supervise() -> None:
        until = time.monotonic() + 60
        while not rundir.storage.exists(LIMIT) and time.monotonic() < until:
            time.sleep(0.02)
        rundir.write_json(STATUS, status)
        os.close(held)

    with ThreadPoolExecutor() as pool:
        pool.submit(supervise)
        assert adopt(tmp_path, stop_at_usd=20.0)[0].success
    assert jobs_noted_since(tmp_path, 0.0) == [Path(rundir.uri).name], "it was gone on with"
    limit = rundir.read_json(LIMIT) or {}
    assert limit["stop_at_usd"] == 20.0
    assert limit["max_node_seconds"] == pytest.approx(20 / 3.06 * 3600), "at one price, whatever was paid before"


@pytest.mark.parametrize("stop_at_usd", [0.0, 20.0])
def test_a_run_that_attaches_asks_what_was_paid_for_a_hard_budget_alone(tmp_path: Path, stop_at_usd: float):
    class Manager:
        def node_usage(self, job_id: str) -> list[NodeUsage]:
            raise ClusterError("nobody answers")

    rundir, run = RunDir(str(tmp_path)), cast(ClusterRun, SimpleNamespace(manager=Manager()))
    got = ClusterConfig(
        cluster_name="a", node_count=1, gpu_type="Standard_NC6s_v3", auto_scale_enabled=False, min_nodes=1,
        max_nodes=1, idle_timeout_minutes=1,
    )  # fmt: skip
    plan = replace(plan_in(tmp_path), stop_at_usd=stop_at_usd)
    with pytest.raises(ClusterError) if stop_at_usd else nullcontext():
        assert hand_over_budget(run, plan, rundir, "j", got) == "no hard budget in dollars is set"


def test_a_run_goes_on_where_people_cannot_be_told(tmp_path: Path, rundir: RunDir):
    (Path(rundir.uri) / TOLD).mkdir()
    found, warnings = adopt(tmp_path)
    assert found.success
    assert any("could not be reported" in text and "Traceback" in text for text in warnings), warnings


@pytest.mark.parametrize(
    ("tier", "usd", "said"),
    [
        ("dedicated", 3.06, "$3.06 (Standard_NC6s_v3: stand-in)"),
        ("spot", None, "cost not known: no spot price of Standard_NC40ads_H100_v5 in eastus is known"),
    ],
)
def test_a_price_that_nobody_knows_fails_no_training_that_is_paid(tmp_path: Path, tier: str, usd: float, said: str):
    sku = "Standard_NC6s_v3" if usd else "Standard_NC40ads_H100_v5"  # what it went on with in the end
    usage = [NodeUsage(node_id=0, sku=sku, tier=tier, started_at=0.0, ended_at=3600.0)]
    total, words = cost_of(usage, plan_in(tmp_path).tier, "stand-in")
    assert total == usd
    assert words.startswith(said)
