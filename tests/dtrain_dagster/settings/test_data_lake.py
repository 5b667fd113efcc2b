from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest
import yaml

from dtrain_dagster.resources import build_resources, value_files
from dtrain_dagster.settings.azure import AzureSettings
from dtrain_dagster.settings.data_lake import DataLakeFolder, compute_log_section, with_compute_logs
from dtrain_dagster.settings.environment import Settings, SettingsError

ADDRESS = "abfss://dagster@values.dfs.core.windows.net/team/a"
FOLDER = DataLakeFolder("values", "dagster", "core.windows.net", "team/a")


@dataclass(frozen=True)
class Bare:
    """A value whose file has none of its fields."""

    dollars: float


def on_azure(monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    given = {
        "SUBSCRIPTION_ID": "00000000-0000-4000-8000-000000000001",
        "RESOURCE_GROUP": "g",
        "WORKSPACE": "w",
        "IMAGE": "registry.azurecr.io/dtrain:1",
    }
    own = {"DTRAIN_CLUSTER": "azure_ml", "DTRAIN_CLUSTER_NAME": "dtrain", "DTRAIN_STORAGE": "az://dtrain"}
    for name, value in ({f"DTRAIN_AZURE_{name}": value for name, value in given.items()} | own | more).items():
        monkeypatch.setenv(name, value)


def test_the_address_names_account_file_system_and_path():
    assert DataLakeFolder.parse(ADDRESS) == FOLDER
    assert DataLakeFolder.parse("abfss://dagster@values.dfs.core.chinacloudapi.cn") == DataLakeFolder(
        "values", "dagster", "core.chinacloudapi.cn", "dagster"
    )


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("az://dagster/team", "abfss://"),
        ("abfss://dagster@values.blob.core.windows.net", "abfss://"),
        ("abfss://dagster@values.dfs.core.windows.net/a/../b", "'..'"),
        ("abfss://dagster@values.dfs.core.windows.net/a?sig=abcdefghijklmn", "signature"),
        ("abfss://dagster:hunter2hunter2@values.dfs.core.windows.net/a", "password"),
    ],
)
def test_another_address_is_refused_and_no_secret_is_repeated(monkeypatch, address, said):
    on_azure(monkeypatch, DTRAIN_AZURE_DAGSTER_STORAGE=address)
    with pytest.raises(SettingsError, match="DTRAIN_AZURE_DAGSTER_STORAGE") as refused:
        AzureSettings.read()
    assert said in str(refused.value)
    assert "hunter2" not in str(refused.value)
    assert "abcdefghijklmn" not in str(refused.value)


@pytest.mark.parametrize("account_url", ["", "https://values.blob.core.windows.net"])
def test_values_do_not_lie_where_nodes_write(monkeypatch, account_url):
    address = "abfss://dtrain@values.dfs.core.windows.net/elsewhere"
    on_azure(monkeypatch, DTRAIN_AZURE_DAGSTER_STORAGE=address, AZURE_STORAGE_ACCOUNT_URL=account_url)
    with pytest.raises(SettingsError, match="run their code"):
        AzureSettings.read()


def test_a_container_of_the_same_name_on_another_account_will_do(monkeypatch):
    address = "abfss://dtrain@values.dfs.core.windows.net/elsewhere"
    other = "https://othervalues.blob.core.windows.net"
    on_azure(monkeypatch, DTRAIN_AZURE_DAGSTER_STORAGE=address, AZURE_STORAGE_ACCOUNT_URL=other)
    assert AzureSettings.read().dagster_folder() is not None


def test_values_stay_here_unless_azure_and_the_address_are_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("DTRAIN_AZURE_DAGSTER_STORAGE", ADDRESS)
    assert build_resources(Settings(home=tmp_path))["io_manager"] is value_files
    on_azure(monkeypatch)
    stored = build_resources(Settings(home=tmp_path))["io_manager"]
    assert not stored.config_schema.config_type.fields, "nothing to choose in a launchpad"
    monkeypatch.delenv("DTRAIN_AZURE_DAGSTER_STORAGE")
    assert build_resources(Settings(home=tmp_path))["io_manager"] is value_files
    assert not value_files.config_schema.config_type.fields, "nothing to choose in a launchpad"


def test_values_are_where_dagster_keeps_them_and_named_by_less_than_their_path(tmp_path: Path):
    @dg.asset(io_manager_key="values")
    def numbers() -> list[int]:
        return [1, 2]

    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        made = dg.materialize([numbers], instance=instance, resources={"values": value_files})
        [event] = made.get_asset_materialization_events()
        assert event.materialization.metadata["path"].value == "numbers in Dagster's storage"
        store = dg.FilesystemIOManager(base_dir=instance.storage_directory())
        assert dg.materialize(
            [numbers, dg.asset(lambda numbers: numbers.copy(), name="copied", io_manager_key="values")],
            instance=instance, resources={"values": store}, selection="copied",
        ).output_for_node("copied") == [1, 2]  # fmt: skip


@pytest.mark.parametrize(
    "stored", [b"cno.such.module\nPlan\n.", pickle.dumps(Bare.__new__(Bare))], ids=["moved", "bare"]
)
def test_a_value_of_another_version_is_refused_with_the_remedy(tmp_path: Path, stored: bytes):
    """Of a class that is elsewhere now, and of one that had fewer fields."""
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        path = Path(instance.storage_directory(), "plan")
        path.parent.mkdir()
        path.write_bytes(stored)
        context = dg.build_init_resource_context(instance=instance)
        key = dg.AssetKey("plan")
        upstream = dg.build_output_context(asset_key=key)
        read = dg.build_input_context(asset_key=key, upstream_output=upstream)
        with read as where, pytest.raises(dg.Failure, match=r"another version \(.+\): materialize plan again"):
            value_files.resource_fn(context).load_input(where)


def test_the_section_is_written_replaced_and_removed_and_the_rest_kept():
    text = "telemetry:\n  enabled: false\n"
    first = with_compute_logs(text, compute_log_section(FOLDER, Path("/home/x")))
    read = yaml.safe_load(first)
    assert read["telemetry"] == {"enabled": False}
    assert read["compute_logs"]["config"]["prefix"] == "team/a"
    edited = first + "run_retries:\n  enabled: true\n"
    second = with_compute_logs(edited, compute_log_section(FOLDER, Path("/home/y")))
    assert yaml.safe_load(second)["compute_logs"]["config"]["local_dir"] == "/home/y"
    assert yaml.safe_load(second)["run_retries"] == {"enabled": True}
    assert yaml.safe_load(with_compute_logs(second, "")) == {
        "telemetry": {"enabled": False},
        "run_retries": {"enabled": True},
    }
    assert with_compute_logs(first, compute_log_section(FOLDER, Path("/home/x"))) == first
    assert with_compute_logs(text, "") == text


def test_a_section_of_somebody_else_is_not_replaced():
    with pytest.raises(ValueError, match="of its own"):
        with_compute_logs("compute_logs:\n  module: other\n", compute_log_section(FOLDER, Path("/home/x")))
