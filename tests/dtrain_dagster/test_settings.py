"""Settings come from the environment, and a bad one is refused by name."""

import pytest

from dtrain_dagster.settings import SettingsError, load_settings


def test_defaults_need_no_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    settings = load_settings()
    assert settings.nodes == 3
    assert settings.storage_uri == str(tmp_path / ".dtrain" / "storage")
    assert settings.tracking_uri == f"sqlite:///{tmp_path}/.dtrain/mlflow.db"


def test_environment_is_read(monkeypatch, tmp_path):
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    monkeypatch.setenv("DTRAIN_NODES", "2")
    monkeypatch.setenv("DTRAIN_MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    settings = load_settings()
    assert (settings.nodes, settings.home, settings.tracking_uri) == (2, tmp_path, "http://127.0.0.1:5000")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DTRAIN_NODES", "three", "valid integer"),
        ("DTRAIN_NODES", "0", "greater than or equal to 1"),
        ("DTRAIN_CLUSTER", "gke", "'local'"),
        ("DTRAIN_CLUSTER_NAME", "my cluster", "pattern"),
        ("DTRAIN_TIER", "spot", "'dedicated'"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_the_default(monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as error:
        load_settings()
    message = str(error.value)
    assert f"{name}={value!r}" in message
    assert said in message
    assert "unset it for the default" in message
