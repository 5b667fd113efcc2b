"""The settings of the engine of data: which Ray is meant, and what is refused with which words."""

from __future__ import annotations

import os

import pytest

from dtrain_dagster.settings.data_engine import read_ray_place
from dtrain_dagster.settings.environment import SettingsError, load_settings
from dtrain_dagster.support.ray_session import RayPlace


def test_a_ray_is_started_here_unless_an_address_is_given(monkeypatch: pytest.MonkeyPatch):
    assert read_ray_place() == RayPlace(cpus=len(os.sched_getaffinity(0)), store_bytes=512 << 20)
    monkeypatch.setenv("DTRAIN_DATA_CPUS", "3")
    monkeypatch.setenv("DTRAIN_DATA_STORE_MB", "100")
    monkeypatch.setenv("DTRAIN_RAY_ADDRESS", "head:6379")
    assert read_ray_place() == RayPlace(address="head:6379", cpus=3, store_bytes=100 << 20)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DTRAIN_RAY_ADDRESS", "head", "give host:port of its head"),
        ("DTRAIN_RAY_ADDRESS", "ray://head:10001", "an address of Ray Client"),
        ("DTRAIN_DATA_CPUS", "0", "DTRAIN_DATA_CPUS"),
        ("DTRAIN_DATA_STORE_MB", "10", "DTRAIN_DATA_STORE_MB"),
    ],
)
def test_unusable_values_are_refused_with_the_setting(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=said):
        read_ray_place()


def test_another_engine_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DTRAIN_DATA_ENGINE", "spark")
    with pytest.raises(SettingsError, match="DTRAIN_DATA_ENGINE='spark'"):
        load_settings()
