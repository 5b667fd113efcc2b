"""What `cost_breakdown` says of a job: by the plan that the job carried out, on what it was really paid for."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster.assets.checks import build_estimate_scored
from dtrain_dagster.assets.costs import build_cost_breakdown
from dtrain_dagster.assets.pipeline import STOCK
from dtrain_dagster.assets.training import FinishedJob
from dtrain_dagster.costs.estimate import Estimate, Interval, Work
from dtrain_dagster.costs.plan import PLAN, TrainingPlan, parse_plan
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.graph_names import STOCK_NAMES
from tests.dtrain_dagster.told_events import START, told, write_run
from tests.page import Page
from trainer.documents.presences import NodePresence
from trainer.rundir import LAUNCH, RESULT, RunDir

estimate_scored = build_estimate_scored(STOCK_NAMES)

cost_breakdown = build_cost_breakdown(STOCK)

SPAN = Interval(low=90.0, expected=100.0, high=110.0)
PLANNED = TrainingPlan(
    fingerprint="aaaaaaaa", job={"training": {"world_size": 3}}, sku="Standard_NC6s_v3", tier="dedicated", node_count=3,
    processes_per_node=1, work=Work(steps=60, evaluations=1, checkpoints=1), basis="", price_note="",
    estimate=Estimate(seconds=SPAN, usd=SPAN.scaled(0.00255), usd_per_node_hour=3.06, node_count=3),
    pace="0badcafe", rests_on=("gone",), learned_factor=1.1, phases={"steps": 90.0},
)  # fmt: skip


def test_a_plan_is_read_back_whoever_wrote_it():
    document = json.loads(json.dumps(asdict(PLANNED)))
    assert parse_plan(document | {"of_a_newer_version": 1}, "here") == PLANNED
    assert parse_plan(document | {"tier": "low_priority"}, "here") == replace(PLANNED, tier="spot")
    assert parse_plan(document | {"basis_kind": "table"}, "here").basis_kind == "table", "as older versions guessed"
    older = {name: value for name, value in document.items() if name not in ("pace", "learned_factor", "phases")}
    assert parse_plan(older, "here") == replace(PLANNED, pace="", learned_factor=1.0, phases={})
    del document["work"]["steps"]
    with pytest.raises(ValueError, match=r"here holds no plan: work\.steps is missing"):
        parse_plan(document, "here")


def broken_down(instance: dg.DagsterInstance, home: Path, rundir: RunDir) -> dict[str, Any]:
    """What `cost_breakdown` and its check say of the job, after `cost_estimate` was made for another training."""

    @dg.asset
    def cost_estimate() -> TrainingPlan:
        return replace(PLANNED, fingerprint="bbbbbbbb", tier="spot")

    @dg.asset
    def trained_checkpoint() -> FinishedJob:
        return FinishedJob(
            job_id=rundir.uri.rsplit("/", 1)[-1], run_dir=rundir.uri, cluster_name="local", node_count=3,
            processes_per_node=1,
        )  # fmt: skip

    found = dg.materialize(
        [cost_estimate, trained_checkpoint, cost_breakdown, estimate_scored],
        instance=instance,
        resources={**build_resources(Settings(home=home)), "io_manager": dg.mem_io_manager},
    )
    [made] = found.asset_materializations_for_node("cost_breakdown")
    [scored] = [item for item in found.get_asset_check_evaluations() if item.check_name == "estimate_scored"]
    return Page({**made.metadata, **scored.metadata})


@pytest.mark.slow
def test_a_job_is_held_against_the_plan_that_it_carried_out(tmp_path: Path) -> None:
    rundir = write_run(tmp_path / "storage" / "jobs", "train-aaaaaaaa-1", told(12), "succeeded")
    rundir.write_json(RESULT, {"epochs": 1, "steps": 60, "samples_seen": 9})
    rundir.write_json(LAUNCH, {"sku": "standard_nc6s_v3"})
    rundir.write_json(PLAN, asdict(PLANNED))
    probe = RunDir(str(tmp_path / "storage" / "jobs" / "gone"))
    probe.make()
    probe.write_json(RESULT, {"status": "succeeded"})  # of a cluster that this one does not know
    for node in range(3):
        rundir.write_node(NodePresence(node_id=node, launch=1, started_at=START - 60, ended_at=START + 40))
    with dg.DagsterInstance.ephemeral() as instance:
        said = broken_down(instance, tmp_path, rundir)
        assert (said["job_id"], said["fingerprint"]) == ("train-aaaaaaaa-1", "aaaaaaaa")
        assert (said["sku"], said["tier"], said["total_usd"]) == ("Standard_NC6s_v3", "dedicated", 0.255)
        assert (said["launches"], said["replaced_nodes"], said["generations"]) == (1, 0, 1)
        assert (said["within_interval"], said["runs"], said["seconds_error_percent"]) == (True, 1, 0.0)
        assert "not_learned" not in said

        for node in range(3):  # resumed two days later
            away = 172_800.0
            stay = NodePresence(node_id=node, launch=2, started_at=START + away, ended_at=START + away + 50)
            rundir.write_node(stay)
        said = broken_down(instance, tmp_path, rundir)
        assert (said["wall_seconds"], said["launches"], said["runs"]) == (150.0, 2, 1), (
            "between launches nothing was there"
        )
        assert said["not_learned"].startswith("it was started 2 times")

        rundir.write_json(LAUNCH, {"sku": "Standard_NC4as_T4_v3"})
        rundir.storage.delete(PLAN)
        said = broken_down(instance, tmp_path, rundir)
        assert said["fingerprint"] == "bbbbbbbb", "no other plan is known"
        assert said["why"].startswith("not scored: it ran on Standard_NC4as_T4_v3 (spot)")
