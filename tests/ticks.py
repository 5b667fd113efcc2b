"""The idle sensor, evaluated as the daemon does, by a clock that a test sets."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster.resources import build_resources
from dtrain_dagster.sensors import idle_cluster
from dtrain_dagster.settings.environment import Settings


class Daemon:
    """One tick after the other, each with the cursor of the last. ``told``: the messages that were sent."""

    def __init__(self, settings: Settings, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings, self.instance = settings, instance
        self.now, self.cursor, self.told = time.time(), "", list[str]()
        monkeypatch.setattr(idle_cluster, "time", SimpleNamespace(time=lambda: self.now))
        monkeypatch.setattr(idle_cluster, "notify_and_log", lambda urls, title, body, log: self.told.append(body))

    def tick(self, seconds: float = 60.0) -> dict[str, Any] | None:
        """Metadata of what was recorded, with ``passed``, the check's verdict; None where nothing was."""
        self.now += seconds
        sensor, resources = idle_cluster.build_idle_cluster_sensor(self.settings), build_resources(self.settings)
        with dg.build_sensor_context(instance=self.instance, cursor=self.cursor, resources=resources) as context:
            result = sensor.evaluate_tick(context)
        self.cursor = result.cursor or ""
        if not result.asset_events:
            return None
        observed, check = result.asset_events
        return {name: item.value for name, item in observed.metadata.items()} | {"passed": check.passed}

    def ticks(self, count: int, seconds: float = 60.0) -> list[dict[str, Any]]:
        """What was recorded in so many ticks."""
        return [found for _ in range(count) if (found := self.tick(seconds)) is not None]
