"""What nobody waits for any more in a workspace: found, told once, ended where the policy says so (R1.2, R5.4)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster.clusters.base import JobSpec
from dtrain_dagster.resources import build_resources
from dtrain_dagster.sensors.orphans import build_orphan_sensor
from dtrain_dagster.settings.environment import Settings, load_settings
from harness.azure.azurite import missing
from harness.azure.emulator import Emulator

V100 = "Standard_NC6s_v3"
LEFT_ALONE, OF_NOBODY, OF_OTHERS = "job-of-a-live-run", "job-of-an-ended-run", "job-of-another-dagster"


@pytest.mark.long
@pytest.mark.slow
def test_orphans_are_found_told_once_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := missing():
        pytest.skip(why)
    with Emulator(tmp_path / "cloud") as cloud, dg.DagsterInstance.ephemeral() as instance:
        cloud.use(monkeypatch)
        for name, value in {
            "DTRAIN_HOME": str(tmp_path / "home"),
            "DTRAIN_CLUSTER": "azure_ml",
            "DTRAIN_CLUSTER_NAME": "dtrain",
            "DTRAIN_STORAGE": "az://dtrain",
            "DTRAIN_AZURE_IMAGE": "emulated.azurecr.io/dtrain:1",
            "DTRAIN_AZURE_POLL_SECONDS": "0.2",
        }.items():
            monkeypatch.setenv(name, value)
        told = load_settings()
        ends = told.model_copy(update={"orphan_policy": "cancel"})
        made = frozenset({dg.AssetKey("trained_checkpoint")})  # by a run of our graph, as those of others do not count
        live, ended = (
            instance.add_run(dg.DagsterRun(job_name="graph", status=status, asset_selection=made)).run_id
            for status in (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.FAILURE)
        )
        for job_id, run_id in ((LEFT_ALONE, live), (OF_NOBODY, ended), (OF_OTHERS, "not-of-this-instance")):
            submit(told, job_id, run_id)

        def tick(settings: Settings, cursor: str | None) -> Any:
            resources = build_resources(settings)
            with dg.build_sensor_context(instance=instance, cursor=cursor, resources=resources) as context:
                return build_orphan_sensor(settings).evaluate_tick(context)

        def states() -> dict[str, str]:
            jobs = cloud.control("state")["jobs"]
            return {name.removesuffix("-l1"): job["status"] for name, job in jobs.items()}

        first = tick(told, None)
        assert not first.asset_events, "the run may be about to be tried again"
        late = an_hour_later(first.cursor)
        cloud.control("fault", fault="error", operation="job.list", status=403, code="AuthorizationFailed")
        blind = tick(told, late)
        assert "lacks a role" in blind.skip_message
        assert blind.cursor == late, "what was seen is not forgotten"

        seen = tick(told, blind.cursor)
        found = by_name(seen)
        nodes = {name: (facts.get("node_count"), facts["sku"]) for name, facts in found.items()}
        assert nodes == {f"{OF_NOBODY}-l1": (1, V100), f"{OF_OTHERS}-l1": (1, V100)}
        assert found[f"{OF_NOBODY}-l1"]["cost_per_hour"].startswith("$3.06 (list price")
        assert all(facts["studio"].startswith("https://ml.azure.com/") for facts in found.values())
        assert "another user's" in found[f"{OF_OTHERS}-l1"]["what_was_done"]
        assert not tick(told, seen.cursor).asset_events, "once is enough"
        assert {states()[job_id] for job_id in (LEFT_ALONE, OF_NOBODY, OF_OTHERS)} == {"Running"}

        done = by_name(tick(ends, seen.cursor))
        assert {name: facts["what_was_done"] for name, facts in done.items()} == {f"{OF_NOBODY}-l1": "ended"}
        assert states() == {LEFT_ALONE: "Running", OF_OTHERS: "Running", OF_NOBODY: "Canceled"}


def submit(settings: Settings, job_id: str, run_id: str) -> None:
    """As a Dagster run does, and it runs for as long as somebody lets it."""
    manager = build_resources(settings)["cluster"].manager(run_id)  # type: ignore[attr-defined]
    manager.provision_cluster(3, V100)
    run_dir, command = f"{settings.jobs_uri}/{job_id}", (sys.executable, "-c", "import time; time.sleep(600)")
    manager.submit_job(JobSpec(job_id=job_id, run_dir=run_dir, command=command, node_count=1))


def an_hour_later(cursor: str) -> str:
    seen = json.loads(cursor)
    for item in seen["orphans"].values():
        item["since"] -= 3600
    return json.dumps(seen)


def by_name(result: Any) -> dict[str, dict[str, Any]]:
    """What was told, by the name of what it was told of."""
    told = [{name: item.value for name, item in check.metadata.items()} for check in result.asset_events]
    return {facts["name"]: facts for facts in told}
