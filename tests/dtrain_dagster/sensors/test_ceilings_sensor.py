"""People are told once per month and level that the ceiling on spending is nearly used, and that it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import dagster as dg
import pytest

from dtrain_dagster.costs.ceilings import CEILINGS, Spending, Stand, write_ceiling
from dtrain_dagster.costs.money import USD
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.jobs.spending import note_start
from dtrain_dagster.resources import build_resources
from dtrain_dagster.sensors.cost_overrun import build_ceilings_sensor, keys_due
from dtrain_dagster.settings.environment import Settings
from tests.webhook import web_hook
from trainer.documents.presences import NodePresence
from trainer.rundir import LAUNCH, STATUS, RunDir

HOURLY = price_of("Standard_NC6s_v3").usd_per_hour("dedicated")


@pytest.fixture
def paid(tmp_path: Path) -> Callable[[str, float], None]:
    """Makes a job that has ended and has cost so many dollars just now."""

    def make(name: str, usd: float) -> None:
        rundir, now = RunDir(f"{tmp_path}/storage/jobs/{name}"), time.time()
        rundir.write_json(
            LAUNCH, {"job_id": name, "launch": 1, "node_count": 1, "engine": "ray", "sku": "Standard_NC6s_v3"}
        )
        began = now - usd / HOURLY * 3600
        rundir.write_node(NodePresence(node_id=0, launch=1, incarnation=1, started_at=began, ended_at=now))
        rundir.write_json(STATUS, {"state": "succeeded", "message": "", "started_at": began, "ended_at": now, "pid": 1})
        note_start(tmp_path, name)

    return make


def look(settings: Settings) -> str:
    sensor = build_ceilings_sensor()
    resources = {key: value for key, value in build_resources(settings).items() if key in sensor.required_resource_keys}
    with dg.build_sensor_context(resources=resources) as context:
        return str(sensor.evaluate_tick(context).skip_message)


def test_each_level_is_told_once(tmp_path: Path, paid: Callable[[str, float], None]) -> None:
    with web_hook() as (url, heard):
        settings = Settings(home=tmp_path, notify=url)
        assert look(settings) == "no ceiling is set"
        write_ceiling(tmp_path, Decimal("0.10"))
        paid("first", 0.079)
        assert look(settings).endswith("0 notice(s)")
        paid("second", 0.011)
        assert look(settings).endswith("1 notice(s)")
        assert look(settings).endswith("0 notice(s)")
        [told] = heard
        assert told["title"] == "dtrain: 90% of the ceiling per month is used"
        assert "most by first $0.0790, second $0.0110; a start that would exceed it is refused" in told["message"]
        paid("third", 0.02)
        look(settings)
        look(settings)
        assert [item["title"] for item in heard[1:]] == ["dtrain: 110% of the ceiling per month is used"]
        assert "nothing new is started" in heard[1]["message"]


def test_levels_that_are_passed_at_once_are_told_as_one(tmp_path: Path, paid: Callable[[str, float], None]) -> None:
    with web_hook() as (url, heard):
        settings = Settings(home=tmp_path, notify=url)
        write_ceiling(tmp_path, Decimal("0.10"))
        paid("first", 0.2)
        look(settings)
        look(settings)
        assert len(heard) == 1


def test_ceilings_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    (tmp_path / CEILINGS).write_text("{")
    assert "the ceiling on spending cannot be read" in look(Settings(home=tmp_path))


def test_each_month_has_its_own_notices() -> None:
    def due(spent: int, promised: int = 0, month: str = "2026-11") -> list[str]:
        spending = (Spending(name="a", month_units=spent, promised_units=promised),)
        return keys_due(Stand(per_month=Decimal(100), month=month, spending=spending))

    assert len({*due(80 * USD), *due(80 * USD, month="2026-12")}) == 2
    assert due(80 * USD - 1) == []
    assert len(due(10 * USD, 90 * USD)) == 2
