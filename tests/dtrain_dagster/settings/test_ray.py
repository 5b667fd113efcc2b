"""The settings of a Ray cluster: what is refused."""

from __future__ import annotations

import pytest

from dtrain_dagster.settings.environment import SettingsError
from dtrain_dagster.settings.ray import RaySettings


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ADDRESS", "head", "DTRAIN_RAY_ADDRESS"),
        ("OPTIONS", "resources=GPU=1", "DTRAIN_NODE_GPUS"),
        ("OPTIONS", "resources=memory=9", "DTRAIN_NODE_MEMORY_GIB"),
        ("GPUS", "1", "DTRAIN_RAY_GPUS is DTRAIN_NODE_GPUS now"),
        ("OPTIONS", "resources=disk", "give name=amount"),
    ],
)
def test_unusable_values_are_refused_with_the_setting(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
):
    monkeypatch.setenv(f"DTRAIN_RAY_{name}", value)
    with pytest.raises(SettingsError, match=said):
        RaySettings.read().options()
