"""Settings come from the environment, and a bad one is refused by name."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.azure_ml.sku_chain import DEFAULT_CHAIN, DEFAULT_CHAINS
from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.costs.prices import hardware_of
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings.azure import AzureSettings
from dtrain_dagster.settings.environment import (
    BUYABLE_GPU_TYPE,
    Settings,
    SettingsError,
    load_settings,
    setting,
    suggest_option,
)
from dtrain_dagster.settings.home import MARKER, find_home, make_home
from dtrain_dagster.settings.slurm import SlurmSettings
from dtrain_dagster.settings.variables import find_unknown_variables, known_variables


def test_defaults_need_no_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    settings = load_settings()
    assert settings.nodes == 3
    assert settings.storage_uri == str(tmp_path / ".dtrain" / "storage")
    assert settings.tracking_uri == f"sqlite:///{tmp_path}/.dtrain/mlflow.db"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("preflight=/opt/check", r"^DTRAIN_OPTIONS: preflight='/opt/check' \(.*give off, quick, full"),
        ("idle_minutes=0", r"^DTRAIN_OPTIONS: idle_minutes='0' \(.*greater than 0; unset it for the default, 10"),
        ("idle_minute=5", r"takes words name=value: idle_minute is not a setting: did you mean idle_minutes\?"),
        ("nodes=5", r"nodes is not a setting: "),
        ("calendar = none", "takes words name=value: give calendar=…, without blanks around the ="),
        ("preflight='full", "quote it as a shell does"),
    ],
)
def test_a_word_of_the_options_that_cannot_be_used_is_refused_by_name(monkeypatch, text, said):
    monkeypatch.setenv("DTRAIN_OPTIONS", text)
    with pytest.raises(SettingsError, match=said):
        load_settings()


def test_options_are_words_as_a_shell_quotes_them(monkeypatch):
    monkeypatch.setenv("DTRAIN_OPTIONS", "calendar=none preflight='full: /opt/check' dagster_url=")
    suggest_option("calendar", "XLON")
    suggest_option("dashboard_url", "http://127.0.0.1:1")
    settings = load_settings(max_replacements=1)
    assert (settings.calendar, settings.preflight, settings.max_replacements) == ("none", "full: /opt/check", 1)
    assert settings.dagster_url == "http://127.0.0.1:3000", "an empty one counts as unset"
    assert setting("dashboard_url") == settings.dashboard_url == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("kind", "variable", "said"),
    [
        (Settings, "DTRAIN_CALENDAR", "in DTRAIN_OPTIONS now: set that to 'calendar=…'"),
        (Settings, "DTRAIN_PEER_GRACE_SECONDS", "is gone: DTRAIN_STOP_GRACE_SECONDS"),
        (AzureSettings, "DTRAIN_AZURE_CHAIN", "in DTRAIN_AZURE_OPTIONS now"),
        (SlurmSettings, "DTRAIN_SLURM_PRICES", "in DTRAIN_SLURM_OPTIONS now"),
    ],
)
def test_a_variable_of_before_is_refused_with_what_replaces_it(monkeypatch, kind, variable, said):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(SettingsError, match=f"^{variable} .*{said}.*and unset this"):
        kind.read()


def test_environment_is_read(monkeypatch, tmp_path):
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    monkeypatch.setenv("DTRAIN_NODES", "2")
    monkeypatch.setenv("DTRAIN_MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    settings = load_settings()
    assert (settings.nodes, settings.home, settings.tracking_uri) == (2, tmp_path, "http://127.0.0.1:5000")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DTRAIN_HOME", "/a?b", "that has one): its path holds '?'"),
        ("DTRAIN_NODES", "three", "valid integer"),
        ("DTRAIN_NODES", "0", "greater than or equal to 1"),
        ("DTRAIN_CLUSTER", "gke", "'local'"),
        ("DTRAIN_CLUSTER_NAME", "my cluster", "pattern"),
        ("DTRAIN_TIER", "low_priority", "must be one or more of dedicated, spot"),
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


AZURE = {
    "DTRAIN_CLUSTER": "azure_ml",
    "DTRAIN_STORAGE": "az://dtrain/team",
    "DTRAIN_AZURE_SUBSCRIPTION_ID": "00000000-0000-4000-8000-000000000001",
    "DTRAIN_AZURE_RESOURCE_GROUP": "rg",
    "DTRAIN_AZURE_WORKSPACE": "ws",
    "DTRAIN_AZURE_IMAGE": "registry.azurecr.io/dtrain:1",
}


def on_azure(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    for name, value in {**AZURE, **changes}.items():
        monkeypatch.setenv(name, value)


def test_the_azure_path_is_set_by_its_own_variables(monkeypatch):
    on_azure(monkeypatch, DTRAIN_AZURE_OPTIONS="chain=Standard_NC4as_T4_v3,Standard_NC24ads_A100_v4")
    cluster = build_resources(load_settings())["cluster"]
    assert cluster.shared_uri == "az://dtrain/team"
    assert cluster.azure_options().chain == ("Standard_NC4as_T4_v3", "Standard_NC24ads_A100_v4")
    assert cluster.azure["idle_seconds"] == 600


def test_a_pre_flight_is_refused_where_no_agent_makes_it(monkeypatch):
    on_azure(monkeypatch, DTRAIN_OPTIONS="preflight=full")
    with pytest.raises(SettingsError, match=r"preflight='full' cannot be used .* unset it"):
        load_settings()


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_a_pre_flight_goes_into_each_launch(monkeypatch, kind):
    monkeypatch.setenv("DTRAIN_CLUSTER", kind)
    monkeypatch.setenv("DTRAIN_OPTIONS", "preflight='full: /opt/check'")
    manager = build_resources(load_settings())["cluster"].manager()
    assert manager.settings.preflight == "full: /opt/check"


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_nodes_keep_their_copies_of_datasets_where_the_user_says(monkeypatch, kind):
    monkeypatch.setenv("DTRAIN_CLUSTER", kind)
    monkeypatch.delenv("DTRAIN_CACHE", raising=False)
    made = build_resources(load_settings())
    usual = made["cluster"].node_env(made["project"])["DTRAIN_CACHE"]
    assert usual == (made["project"].cache_dir if kind == "local" else "/tmp/dtrain-cache")
    monkeypatch.setenv("DTRAIN_CACHE", "/scratch/mine")
    assert made["cluster"].node_env(made["project"])["DTRAIN_CACHE"] == "/scratch/mine"


def test_nodes_elsewhere_are_told_how_long_a_process_has_to_end(monkeypatch):
    """A pod has nothing of the submitter's environment; its agent would end a process after the usual 8 seconds."""
    monkeypatch.setenv("DTRAIN_CLUSTER", "slurm")
    made = build_resources(load_settings())
    assert not [name for name in made["cluster"].node_env(made["project"]) if "GRACE" in name]
    monkeypatch.setenv("DTRAIN_STOP_GRACE_SECONDS", "90")
    assert made["cluster"].node_env(made["project"])["DTRAIN_STOP_GRACE_SECONDS"] == "90"


def test_azure_is_asked_for_what_can_be_bought_and_a_v100_stands_in_elsewhere(monkeypatch):
    assert load_settings().gpu_type == "Standard_NC6s_v3"
    on_azure(monkeypatch)
    assert build_resources(load_settings())["cluster"].gpu_type == BUYABLE_GPU_TYPE
    for unset, wanted in (("", BUYABLE_GPU_TYPE), ("Standard_NC6s_v3", "Standard_NC6s_v3")):
        monkeypatch.setenv("DTRAIN_GPU_TYPE", unset)
        assert load_settings().gpu_type == wanted
    assert hardware_of(BUYABLE_GPU_TYPE).retired_on is None


@pytest.mark.parametrize(
    ("changes", "chain"),
    [
        ({}, DEFAULT_CHAIN),
        ({"DTRAIN_REGION": "westus2"}, tuple(sku for sku in DEFAULT_CHAIN if "H100" not in sku)),
        ({"DTRAIN_GPU_TYPE": "Standard_NC96ads_A100_v4"}, DEFAULT_CHAINS[4]),
        (
            {"DTRAIN_GPU_TYPE": "Standard_NC96ads_A100_v4", "DTRAIN_TIER": "dedicated,spot"},
            ("Standard_NC96ads_A100_v4",),
        ),
        ({"DTRAIN_PROCESSES_PER_NODE": "3"}, DEFAULT_CHAIN),
    ],
)
def test_without_a_chain_what_has_as_many_gpus_and_a_price_is_tried(monkeypatch, changes, chain):
    on_azure(monkeypatch, **changes)
    assert build_resources(load_settings())["cluster"].azure_options().chain == chain


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"DTRAIN_AZURE_WORKSPACE": ""}, "DTRAIN_AZURE_WORKSPACE (Azure ML workspace) is not set"),
        ({"DTRAIN_AZURE_SUBSCRIPTION_ID": "mine"}, "az account show"),
        ({"DTRAIN_AZURE_OPTIONS": "subnet=s"}, "DTRAIN_AZURE_OPTIONS: subnet='s'"),
        ({"DTRAIN_AZURE_OPTIONS": "identity=me"}, "DTRAIN_AZURE_OPTIONS: identity='me'"),
        ({"DTRAIN_AZURE_OPTIONS": "chain=NC6"}, "NC6 is no size such as"),
        ({"DTRAIN_CLUSTER_NAME": "a-name-that-is-too-long"}, "DTRAIN_CLUSTER_NAME=a-name-that-is-too-long must be"),
        ({"DTRAIN_AZURE_OPTIONS": "queue_deadline_seconds=0"}, "queue_deadline_seconds='0'"),
        ({"DTRAIN_STORAGE": ""}, "az://container/path"),
        (
            {"DTRAIN_AZURE_OPTIONS": "chain=Standard_NC4as_T4_v3,Standard_Unpriced"},
            "no price is known for SKU 'Standard_Unpriced'",
        ),
        ({"DTRAIN_TIER": "cheap"}, "cheap"),
        (
            {
                "DTRAIN_GPU_TYPE": "Standard_NC40ads_H100_v5",
                "DTRAIN_AZURE_OPTIONS": "chain=Standard_NC40ads_H100_v5",
                "DTRAIN_TIER": "dedicated,spot",
            },
            "Standard_NC40ads_H100_v5 (Spot) may be bought (DTRAIN_GPU_TYPE, DTRAIN_TIER, chain in "
            "DTRAIN_AZURE_OPTIONS): no spot price of Standard_NC40ads_H100_v5 in eastus is known",
        ),
        (
            {"DTRAIN_AZURE_OPTIONS": "chain=Standard_NC40ads_H100_v5", "DTRAIN_TIER": "spot"},
            "`dtrain cost --refresh --region eastus --sku Standard_NC40ads_H100_v5`",
        ),
    ],
)
def test_what_azure_would_refuse_is_refused_before_anything_runs(monkeypatch, changes, said):
    on_azure(monkeypatch, **changes)
    with pytest.raises(SettingsError) as error:
        build_resources(load_settings())
    assert said in str(error.value)


def test_the_azure_path_loads_without_the_sdk_and_without_a_network(monkeypatch):
    """In a process of its own, where connecting anywhere fails."""
    on_azure(monkeypatch)
    program = (
        "import socket, sys\n"
        "def no(*_, **__): raise AssertionError('the network was asked')\n"
        "socket.socket.connect = socket.getaddrinfo = no\n"
        "import dtrain_dagster.definitions as loaded\n"
        "assert loaded.defs.resources['cluster'].kind == 'azure_ml'\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('azure', 'torch', 'mlflow')]\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_tiers_and_idle_time_are_asked_once_for_every_kind_of_cluster(monkeypatch):
    on_azure(monkeypatch, DTRAIN_TIER="spot, dedicated, spot", DTRAIN_OPTIONS="idle_minutes=2.5")
    cluster = build_resources(load_settings())["cluster"]
    assert (cluster.first_tier, cluster.tier) == ("spot", "spot")
    options = cluster.azure_options()
    assert (options.tiers, options.idle_seconds) == (("spot", "dedicated"), 150)


def test_an_idle_time_beyond_what_azure_takes_is_refused(monkeypatch):
    on_azure(monkeypatch, DTRAIN_OPTIONS="idle_minutes=2000")
    with pytest.raises(SettingsError, match=r"idle_minutes=2000 is not between .* the 1440"):
        build_resources(load_settings())


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("cluster_name", "twenty-letters-is-more", "DTRAIN_CLUSTER_NAME"),
        ("azure", {"idle_seconds": 0}, "idle_minutes=0"),
        ("azure", {"tiers": []}, "tiers is empty"),
        ("azure", {"chain": ["a V100"]}, "^DTRAIN_AZURE_OPTIONS: chain=.* a V100 is no size such as"),
        ("azure", {"spot": True}, "spot is not a setting"),
    ],
)
def test_what_a_launchpad_changed_is_checked_as_well(monkeypatch, field: str, value: Any, said: str):
    on_azure(monkeypatch)
    cluster = build_resources(load_settings())["cluster"]
    changed = getattr(cluster, field) | value if isinstance(value, dict) else value
    with pytest.raises(ClusterError, match=said):
        cluster.model_copy(update={field: changed}).azure_options()


def test_a_variable_that_nothing_reads_is_told_with_the_one_that_was_meant():
    known = known_variables()
    assert {"DTRAIN_NODES", "DTRAIN_AZURE_WORKSPACE", "DTRAIN_CACHE", "DTRAIN_STOP_GRACE_SECONDS"} <= known
    environment = {
        "DTRAIN_NODE": "3",
        "DTRAIN_AZURE_WORKSPCE": "w",
        "DTRAIN_COFFEE": "black",
        "DTRAIN_NODES": "2",
        "DTRAIN_NOTIFY": "env:DTRAIN_MY_TOKEN",
        "DTRAIN_MY_TOKEN": "secret",
        "PATH": "/bin",
    }
    said = find_unknown_variables(environment, known)
    assert said == [
        "the variable DTRAIN_AZURE_WORKSPCE is set, and nothing reads it; did you mean DTRAIN_AZURE_WORKSPACE?",
        "the variable DTRAIN_COFFEE is set, and nothing reads it; `make docs` builds a reference of all",
        "the variable DTRAIN_NODE is set, and nothing reads it; did you mean DTRAIN_NODES?",
    ]
    assert "secret" not in "".join(said)


def test_the_home_is_found_from_any_folder_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DTRAIN_HOME", raising=False)
    project = tmp_path / "project"
    below = project / "notebooks" / "old"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert load_settings().home == below / ".dtrain", "nothing is marked yet"
    (project / ".dtrain").mkdir()
    assert load_settings().home == below / ".dtrain", "a folder of that name is not yet a home"
    make_home(project / ".dtrain")
    assert load_settings().home == project / ".dtrain"
    make_home(project / ".dtrain" / "storage")  # as a test would leave it
    monkeypatch.chdir(project / ".dtrain" / "storage")
    assert load_settings().home == project / ".dtrain" / "storage", "the nearest"
    monkeypatch.setenv("DTRAIN_HOME", ".dtrain")
    assert load_settings().home == project / ".dtrain" / "storage" / ".dtrain", "what is set counts as it is written"


def test_a_home_of_another_user_above_is_not_used(tmp_path: Path):
    make_home(tmp_path / ".dtrain")
    assert find_home(tmp_path) == tmp_path / ".dtrain"
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(tmp_path / ".dtrain" / MARKER, 65534, -1)
    assert find_home(tmp_path / "work") == tmp_path / "work" / ".dtrain"


def test_a_setting_that_is_given_by_a_name_that_is_none_is_refused():
    with pytest.raises(SettingsError, match=r"^nodse is not a setting: did you mean nodes\?$"):
        Settings(nodse=3)  # type: ignore[call-arg]
