"""The settings of a Ray cluster: what is refused, and where a RayCluster of KubeRay is found."""

from __future__ import annotations

import pytest

from dtrain_dagster.settings.environment import SettingsError
from dtrain_dagster.settings.ray import RaySettings


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ADDRESS", "head", "DTRAIN_RAY_ADDRESS"),
        ("CLUSTER", "a/b/c", "DTRAIN_RAY_CLUSTER"),
        ("CLUSTER", "n" * 42, "DTRAIN_RAY_CLUSTER"),
        ("RESOURCES", "GPU=1", "DTRAIN_RAY_GPUS"),
        ("RESOURCES", "disk", "give name=amount"),
    ],
)
def test_unusable_values_are_refused_with_the_setting(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
):
    monkeypatch.setenv(f"DTRAIN_RAY_{name}", value)
    with pytest.raises(SettingsError, match=said):
        RaySettings.read().options()


@pytest.mark.parametrize(
    ("given", "address", "dashboard"),
    [
        ("train", "ray://train-head-svc:10001", "http://train-head-svc:8265"),
        ("ml/train", "ray://train-head-svc.ml.svc:10001", "http://train-head-svc.ml.svc:8265"),
    ],
)
def test_a_ray_cluster_of_kuberay_is_found_by_its_name(
    monkeypatch: pytest.MonkeyPatch, given: str, address: str, dashboard: str
):
    monkeypatch.setenv("DTRAIN_RAY_CLUSTER", given)
    found = RaySettings.read().options()
    assert (found["address"], found["dashboard"]) == (address, dashboard)
    assert "cluster" not in found
    monkeypatch.setenv("DTRAIN_RAY_DASHBOARD", "http://gateway:80")
    assert RaySettings.read().options()["dashboard"] == "http://gateway:80"
    monkeypatch.setenv("DTRAIN_RAY_ADDRESS", "head:6379")
    with pytest.raises(SettingsError, match="cannot be combined: unset one"):
        RaySettings.read().options()
