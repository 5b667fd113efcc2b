"""No capacity: a run gets a place in the queue; the sensor starts it when there is some, and tells a person (R1.4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster.automation.capacity_queue import WaitingList, new_ticket
from dtrain_dagster.definitions import build_defs
from dtrain_dagster.resources import build_resources
from dtrain_dagster.sensors.queue import build_queue_sensor
from dtrain_dagster.settings.environment import load_settings
from harness.azure.azurite import missing
from harness.azure.emulator import Emulator
from tests.webhook import web_hook

from .conftest import ON_AZURE, small_prices, whole_graph

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
UP_TO_THE_PLAN = [dg.AssetKey(name) for name in ("stock_prices", "sharded_dataset", "cost_estimate")]


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    with web_hook() as found:
        yield found


@pytest.mark.long
def test_a_run_without_capacity_waits_and_is_started_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: tuple[str, list[dict[str, Any]]]
) -> None:
    if why := missing():
        pytest.skip(why)
    url, heard = hook
    nothing = {"fault": "refuse", "vm_size": "*", "how": "sync", "count": None}
    with Emulator(tmp_path / "cloud", [nothing]) as cloud:
        cloud.use(monkeypatch)
        for name, value in {
            **ON_AZURE,
            "DTRAIN_HOME": str(tmp_path / "home"),
            "DTRAIN_PRICES": str(small_prices(tmp_path)),
            "DTRAIN_NODES": "1",
            "DTRAIN_NOTIFY": url,
        }.items():
            monkeypatch.setenv(name, value)
        settings = load_settings()
        job = build_defs(settings).resolve_implicit_global_asset_job_def()
        queue = WaitingList(settings.shared_uri)
        with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:

            def materialize(selection: list[dg.AssetKey], **more: Any) -> dg.ExecuteInProcessResult:
                return job.execute_in_process(
                    instance=instance, raise_on_error=False, asset_selection=selection, **more
                )

            def tick() -> Any:
                resources = {name: build_resources(settings)[name] for name in ("project", "cluster")}
                repository = build_defs(settings).get_repository_def()
                with dg.build_sensor_context(instance, resources=resources, repository_def=repository) as context:
                    return build_queue_sensor(settings).evaluate_tick(context)

            config = {"ops": {"cost_estimate": {"config": {"epochs": 2, "warmup_steps": 1}}}}
            refused = materialize(UP_TO_THE_PLAN, run_config=config)
            assert not refused.success
            [failure] = [event for event in refused.all_events if event.is_step_failure]
            said = failure.step_failure_data.user_failure_data  # type: ignore[union-attr]
            assert "position 1" in said.description
            assert "SkuNotAvailable" in said.description
            assert not cloud.control("bought")["jobs"]
            [ticket] = queue.tickets()
            assert ticket.run_id == refused.run_id
            assert not tick().run_requests, "it is not due yet"

            queue.put(replace(ticket, retry_at=0.0))
            [again] = tick().run_requests
            refused_again = materialize(again.asset_selection, run_config=again.run_config, tags=again.tags)
            assert not refused_again.success
            [ticket] = queue.tickets()
            assert ticket.attempt == 3
            assert not heard

            cloud.control("clear")
            queue.put(replace(ticket, retry_at=0.0))
            [started] = tick().run_requests
            assert started.run_key != again.run_key
            assert set(started.asset_selection) == set(UP_TO_THE_PLAN)
            done = materialize(started.asset_selection, run_config=started.run_config, tags=started.tags)
            assert done.success
            assert not queue.tickets()
            [message] = heard
            assert "starts" in message["title"]
            assert done.run_id in message["message"]
            assert "no run waits" in tick().skip_message


@pytest.mark.long
def test_a_run_whose_nodes_never_come_keeps_its_place_and_is_told_once_when_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: tuple[str, list[dict[str, Any]]]
) -> None:
    """R1.4, where the cloud takes the order and brings no node: the place is that of the first wait, whoever came
    since, and the next run, of an orchestrator that has started anew, goes on with it."""
    if why := missing():
        pytest.skip(why)
    url, heard = hook
    with Emulator(tmp_path / "cloud", [{"fault": "capacity", "nodes": 0, "count": None}]) as cloud:
        cloud.use(monkeypatch)
        for name, value in {
            **ON_AZURE,
            "DTRAIN_HOME": str(tmp_path / "home"),
            "DTRAIN_PRICES": str(small_prices(tmp_path)),
            "DTRAIN_NODES": "1",
            "DTRAIN_NOTIFY": url,
            "DTRAIN_GPU_TYPE": "Standard_NC6s_v3",
            "DTRAIN_AZURE_OPTIONS": "chain=Standard_NC6s_v3 queue_deadline_seconds=2",
        }.items():
            monkeypatch.setenv(name, value)
        config = {"ops": {"cost_estimate": {"config": {"epochs": 2, "warmup_steps": 1}}}}

        def materialize(**more: Any) -> dg.ExecuteInProcessResult:
            settings = load_settings()
            job = build_defs(settings).resolve_implicit_global_asset_job_def()
            with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
                chosen = {"asset_selection": whole_graph(job)} | more
                return job.execute_in_process(instance=instance, raise_on_error=False, **chosen)

        def tick() -> Any:
            settings = load_settings()
            resources = {name: build_resources(settings)[name] for name in ("project", "cluster")}
            with (
                dg.DagsterInstance.local_temp(str(tmp_path)) as instance,
                dg.build_sensor_context(
                    instance, resources=resources, repository_def=build_defs(settings).get_repository_def()
                ) as context,
            ):
                return build_queue_sensor(settings).evaluate_tick(context)

        starved = materialize(asset_selection=UP_TO_THE_PLAN, run_config=config)
        assert not starved.success
        [failure] = [event for event in starved.all_events if event.is_step_failure]
        said = failure.step_failure_data.user_failure_data.description  # type: ignore[union-attr]
        assert "position 1" in said
        assert "waiting for nodes" in said
        assert {job["status"] for job in cloud.control("state")["jobs"].values()} == {"Canceled"}
        queue = WaitingList(load_settings().shared_uri)
        [ticket] = queue.tickets()
        [message] = of_runs(heard)
        assert message["title"] == "dtrain: a run waits for capacity"
        assert "position 1" in message["message"]
        later = new_ticket("another-run", [], {}, "no quota", ticket.queued_at + 1, 3600)
        queue.put(later)

        queue.put(replace(ticket, retry_at=0.0))
        [again] = tick().run_requests
        assert not materialize(asset_selection=again.asset_selection, run_config=config, tags=again.tags).success
        [first, second] = queue.tickets()
        assert (first.ticket, first.attempt, second.ticket) == (ticket.ticket, 3, later.ticket)
        assert len(of_runs(heard)) == 1, "its place has not changed"
        assert not cloud.control("bought")["alive_nodes"]

        cloud.control("clear")
        queue.put(replace(first, retry_at=0.0))
        [third] = tick().run_requests
        monkeypatch.setenv("DTRAIN_AZURE_OPTIONS", "chain=Standard_NC6s_v3 queue_deadline_seconds=600")
        done = materialize(asset_selection=third.asset_selection, run_config=config, tags=third.tags)
        assert done.success
        assert [item.ticket for item in queue.tickets()] == [later.ticket]
        assert ["starts" in item["title"] for item in of_runs(heard)] == [False, True]
        assert all(job["launches"] <= 1 for job in cloud.control("bought")["jobs"].values())


def of_runs(heard: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Beside these, there are notices of each launch of a job."""
    return [item for item in heard if item["title"].startswith("dtrain: a run ")]
