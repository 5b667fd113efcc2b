"""The settings of a SLURM cluster: what is refused before anything is submitted, and with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain_dagster.settings.environment import SettingsError
from dtrain_dagster.settings.slurm import SlurmSettings, read_partition_prices


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PARTITION", "gpu; rm -rf /", "DTRAIN_SLURM_PARTITION"),
        ("OPTIONS", "host=-oProxyCommand=sh", "DTRAIN_SLURM_OPTIONS: host"),
        ("MEMORY", "8G", "DTRAIN_SLURM_MEMORY is DTRAIN_NODE_MEMORY_GIB now"),
        ("OPTIONS", "extra=--time=5", "set time_limit_minutes in DTRAIN_SLURM_OPTIONS"),
        ("OPTIONS", "extra='-p gpu'", "is not an option of sbatch"),
        ("OPTIONS", "extra=--export=PATH,TOKEN=planted", "takes names of variables alone"),
        ("OPTIONS", "extra=--export=ALL", "takes names of variables alone"),
        ("OPTIONS", "time_limit_minutes=1", "DTRAIN_SLURM_OPTIONS: time_limit_minutes"),
    ],
)
def test_unusable_values_are_refused_with_the_setting(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
):
    monkeypatch.setenv(f"DTRAIN_SLURM_{name}", value)
    with pytest.raises(SettingsError, match=said.replace("(", r"\(")):
        SlurmSettings.read().options()


def test_lists_are_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DTRAIN_SLURM_OPTIONS", "extra=\"--nice=100 '--comment=a b' --export=PATH,HF_HOME\"")
    found = SlurmSettings.read().options()
    assert found["extra"] == ["--nice=100", "--comment=a b", "--export=PATH,HF_HOME"]


def test_prices_of_partitions_are_checked_where_they_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert read_partition_prices() == {}
    path = tmp_path / "prices.json"
    monkeypatch.setenv("DTRAIN_SLURM_OPTIONS", f"prices={path}")
    with pytest.raises(SettingsError, match=r"DTRAIN_SLURM_OPTIONS: prices=.*: it cannot be read as JSON"):
        read_partition_prices()
    for text in (
        "[2.5]",
        '{"gpu": "2.5"}',
        '{"gpu": -1}',
        '{"gpu": 0}',
        '{"gpu": true}',
        '{"gpu": NaN}',
        '{"gpu": 1e999}',
    ):
        path.write_text(text)
        with pytest.raises(SettingsError, match="dollars per node-hour"):
            read_partition_prices()
    path.write_text('{"gpu": 2.5, "cpu": 1}')
    assert read_partition_prices() == {"gpu": 2.5, "cpu": 1.0}
    assert "prices" not in SlurmSettings.read().options()
