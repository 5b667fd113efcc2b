"""The engine of data: another one than there is."""

import pytest

from dtrain_dagster.settings.environment import SettingsError, load_settings


def test_another_engine_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DTRAIN_OPTIONS", "data_engine=spark")
    with pytest.raises(SettingsError, match="DTRAIN_OPTIONS: data_engine='spark'"):
        load_settings()
