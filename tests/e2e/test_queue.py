"""No capacity: a run gets a place in the queue; the sensor starts it when there is some, and tells a person (R1.4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster.automation.capacity_queue import WaitingList
from dtrain_dagster.definitions import build_defs
from dtrain_dagster.resources import build_resources
from dtrain_dagster.sensors.queue import build_queue_sensor
from dtrain_dagster.settings.environment import load_settings
from tests.azure.azurite import missing
from tests.azure.emulator import Emulator
from tests.webhook import web_hook

from .conftest import ON_AZURE, small_prices

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
UP_TO_THE_PLAN = [dg.AssetKey(name) for name in ("stock_prices", "sharded_dataset", "cost_estimate")]


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    with web_hook() as found:
        yield found


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
                resources = {"project": build_resources(settings)["project"]}
                with dg.build_sensor_context(instance=instance, resources=resources) as context:
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
