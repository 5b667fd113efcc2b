"""`dtrain doctor` in front of the emulated subscription: what is well, and each thing that can be planted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dtrain_dagster.cli.main import main
from harness.azure.emulator import Emulator
from harness.azure.emulator.around import CLIENT_ID, IDENTITY_ID, SUBNET_ID
from trainer.storage.open import open_storage

A100, H100 = "Standard_NC24ads_A100_v4", "Standard_NC40ads_H100_v5"
IMAGE = "team.azurecr.io/dtrain-nodes:1"
WS = "Microsoft.MachineLearningServices/workspaces/"
OTHER_ID = "22222222-2222-4222-8222-222222222222"
DENIED = (
    "The client 'a' with object id 'b' does not have authorization to perform action '{operation}' over scope '/c' or "
    "the scope is invalid. If access was recently granted, please refresh your credentials."
)
BY_NETWORK = (
    "User is not authorized to access provided resources due to none of the workspaces/registries are accessible from "
    "outside of the designated private link.."
)


@dataclass
class Practice:
    """The doctor, with everything as it should be until a test changes it."""

    cloud: Emulator
    setenv: Callable[[str, str], None]
    delenv: Callable[[str], None]

    def lines(self, *arguments: str, code: int = 0) -> list[dict[str, str]]:
        done = CliRunner().invoke(main, ["doctor", "--json", *arguments])
        assert done.exit_code == code, done.output
        document = json.loads(done.stdout)
        assert set(document) == {"counts", "lines"}
        assert (document["counts"]["missing"] > 0) is (code == 1)
        found: list[dict[str, str]] = document["lines"]
        return found

    def wrong(self, check: str, code: int = 1) -> list[dict[str, str]]:
        """The lines of a check that are not ok, but for the image's, which nobody has looked for. Each says what to
        do."""
        bad = [line for line in self.lines(code=code) if line["verdict"] != "ok" and IMAGE not in line["seen"]]
        found = [line for line in bad if line["check"] == check]
        assert all(line["remedy"] for line in found)
        return found

    def one(self, check: str, verdict: str, seen: str, code: int | None = None) -> dict[str, str]:
        """The one line of a check that is not ok; what was seen holds ``seen``."""
        [line] = self.wrong(check, int(verdict == "missing") if code is None else code)
        assert line["verdict"] == verdict, line
        assert seen in line["seen"], line
        return line

    def refuse(self, operation: str, code: str, message: str) -> None:
        fault = {"fault": "error", "status": 403, "count": None}
        self.cloud.control("fault", **fault, operation=operation, code=code, message=message)


def options(**changes: str) -> str:
    """Return DTRAIN_AZURE_OPTIONS of a subscription that is well, with ``changes``; "" leaves one out."""
    usual = {"chain": H100, "subnet": SUBNET_ID, "identity": IDENTITY_ID, "identity_client_id": CLIENT_ID}
    return " ".join(f"{name}={value}" for name, value in (usual | changes).items() if value)


@pytest.fixture
def practice(emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Practice]:
    for name in [name for name in os.environ if name.startswith("DTRAIN_")]:
        monkeypatch.delenv(name)
    emulator.use(monkeypatch)
    for name, value in {
        "DTRAIN_HOME": str(tmp_path / "home"),
        "DTRAIN_CLUSTER": "azure_ml",
        "DTRAIN_GPU_TYPE": A100,
        "DTRAIN_NODES": "3",
        "DTRAIN_AZURE_IMAGE": IMAGE,
        "DTRAIN_AZURE_OPTIONS": options(),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    yield Practice(emulator, monkeypatch.setenv, monkeypatch.delenv)
    emulator.control("clear")
    emulator.control("around")


@pytest.mark.slow
def test_a_subscription_that_is_well_and_nothing_is_bought(practice: Practice) -> None:
    before = len(practice.cloud.control("requests"))
    shown = CliRunner().invoke(main, ["doctor"])
    assert shown.exit_code == 0, shown.output
    assert "0 missing, 1 warnings. Nothing was bought" in shown.stdout
    assert f"→ see that nodes can pull it: `az acr manifest show {IMAGE}`" in shown.stdout
    asked = practice.cloud.control("requests")[before:]
    lines = practice.lines()
    assert {line["check"] for line in lines if line["verdict"] != "ok"} == {"images"}
    seen = {line["check"]: line["seen"] for line in lines}
    assert list(dict.fromkeys(line["check"] for line in lines)) == [
        *("identity", "workspace", "roles", "storage", "prices", "sizes", "images", "network", "nodes")
    ]
    assert "2 of 2 choices can be asked for" in seen["sizes"]
    [a100] = [line["seen"] for line in lines if line["seen"].startswith(f"{A100}: 3 node(s)")]
    cores = "TotalDedicatedCores has 10000 free of 10000, StandardNCADSA100v4Family has 1000 free of 1000"
    assert f"3 node(s) need 72 cores; {cores}" in a100
    assert "application 00000000-" in lines[0]["seen"]
    assert {one["method"] for one in asked} == {"GET"}
    assert practice.cloud.control("bought")["node_minutes"] == 0
    assert open_storage(f"{practice.cloud.environment['DTRAIN_STORAGE']}/doctor").list() == []


def test_no_identity(practice: Practice) -> None:
    practice.setenv("IDENTITY_HEADER", "wrong")
    lines = practice.lines(code=1)
    [line] = lines
    assert (line["check"], line["verdict"]) == ("identity", "missing")
    assert "no token for Azure" in line["seen"]
    shown = CliRunner().invoke(main, ["doctor"])
    assert shown.exit_code == 1
    assert f"\n{'':20}→ {line['remedy']}\n1 missing, 0 warnings. Nothing was bought" in shown.stdout
    assert "`az login`" in line["remedy"]


@pytest.mark.parametrize(
    ("around", "setting", "check", "verdict", "seen", "remedy"),
    [
        ({"workspace": {"provisioningState": "Failed"}}, {}, "workspace", "missing", "is Failed", "deploy it again"),
        ({}, {"DTRAIN_REGION": "westus2"}, "workspace", "missing",
         "is in eastus, and DTRAIN_REGION, whose prices count, is westus2", "`export DTRAIN_REGION=eastus`"),
        ({"actions": [f"{WS}*"], "not_actions": [f"{WS}computes/write"]}, {}, "roles", "missing",
         f"{WS}computes/write is not granted", '--role "dtrain orchestrates (<prefix>)" --scope /subscriptions/'),
        ({}, {"DTRAIN_STORAGE": "az://absent"}, "storage", "missing", "has no such container: create it", ""),
        ({}, {"AZURE_STORAGE_ACCOUNT_URL": ""}, "storage", "missing", "AZURE_STORAGE_ACCOUNT_URL is not set", ""),
        ({}, {"DTRAIN_AZURE_IMAGE": "dtrain-nodes:1"}, "images", "warning", "names no registry", "azurecr.io/"),
        ({}, {"DTRAIN_AZURE_IMAGE": "azureml:absent:3"}, "images", "missing", "does not exist: absent:3", ""),
        ({}, {"DTRAIN_AZURE_OPTIONS": options(subnet=SUBNET_ID + "2")}, "network", "missing", "NotFound",
         "subnet in DTRAIN_AZURE"),
        ({}, {"DTRAIN_AZURE_OPTIONS": options(subnet="")}, "network", "missing", "no subnet is named",
         "set subnet in DTRAIN_AZURE"),
        ({}, {"DTRAIN_AZURE_OPTIONS": options(identity_client_id=OTHER_ID)}, "identity", "missing",
         f"client id {CLIENT_ID}; identity_client_id is 2222",
         f"put `identity_client_id={CLIENT_ID}` into DTRAIN_AZURE"),
        ({}, {"DTRAIN_AZURE_OPTIONS": options(identity="", identity_client_id="")}, "identity", "warning",
         "their compute's identity", "outputs of deploy/azure"),
        ({}, {"DTRAIN_AZURE_WORKSPACE": ""}, "settings", "missing", "DTRAIN_AZURE_WORKSPACE", ""),
        ({}, {"DTRAIN_AZURE_OPTIONS": options(chain=f"{H100},Standard_NC999_v9")}, "prices", "missing",
         "Standard_NC999_v9: no price is known", ""),
    ],
)  # fmt: skip
def test_what_is_not_as_it_should_be_is_told_with_its_remedy(
    practice: Practice,
    around: dict[str, Any],
    setting: dict[str, str],
    check: str,
    verdict: str,
    seen: str,
    remedy: str,
) -> None:
    practice.cloud.control("around", **around)
    for name, value in setting.items():
        practice.setenv(name, value) if value else practice.delenv(name)
    assert remedy in practice.one(check, verdict, seen)["remedy"]


@pytest.mark.parametrize(
    ("name", "value", "code", "remedy"),
    [
        (
            "SUBSCRIPTION_ID",
            "00000000-0000-4000-8000-0000000000ff",
            "SubscriptionNotFound",
            "_SUBSCRIPTION_ID",
        ),
        ("RESOURCE_GROUP", "other", "ResourceGroupNotFound", "DTRAIN_AZURE_RESOURCE_GROUP"),
        ("WORKSPACE", "other", "ResourceNotFound", "DTRAIN_AZURE_WORKSPACE"),
    ],
)
def test_names_that_nothing_has(practice: Practice, name: str, value: str, code: str, remedy: str) -> None:
    practice.setenv(f"DTRAIN_AZURE_{name}", value)
    lines = practice.lines(code=1)
    [line] = [line for line in lines if line["check"] == "workspace"]
    assert line["verdict"] == "missing"
    assert code in line["seen"]
    assert remedy in line["remedy"]
    assert "roles" not in {line["check"] for line in lines}, "what is in it need not be asked for"


def test_a_read_that_is_not_allowed_names_its_operation_and_the_role(practice: Practice) -> None:
    practice.refuse("identity.get", "AuthorizationFailed", DENIED.format(operation="Microsoft.Identity/x/read"))
    remedy = practice.one("identity", "missing", "perform action 'Microsoft.Identity/x/read'")["remedy"]
    assert remedy.startswith("`az role assignment create --assignee 00000000-")
    assert f'--role "Managed Identity Operator" --scope {IDENTITY_ID}`' in remedy


def test_a_read_that_a_network_rule_refuses_is_not_called_a_missing_role(practice: Practice) -> None:
    practice.refuse("identity.get", "UserError", BY_NETWORK)
    assert "not a missing role" in practice.one("identity", "missing", "UserError: ")["remedy"]


def test_permissions_that_cannot_be_listed_are_no_fault(practice: Practice) -> None:
    operation = "Microsoft.Authorization/permissions/read"
    practice.refuse("permissions.list", "AuthorizationFailed", DENIED.format(operation=operation))
    assert operation in practice.one("roles", "warning", "cannot be listed")["remedy"]


def test_without_a_chain_the_sizes_that_a_purchase_would_try_are_looked_at(practice: Practice) -> None:
    practice.setenv("DTRAIN_AZURE_OPTIONS", options(chain=""))
    practice.cloud.control("quota", family="StandardNCADSA100v4Family", cores=0)
    lines = [line for line in practice.lines() if line["check"] == "sizes"]
    assert lines[0]["verdict"] == "warning"
    assert f"{len(lines) - 2} of {len(lines) - 1} choices can be asked for" in lines[-1]["seen"]
    assert any(H100 in line["seen"] for line in lines)


def test_quotas(practice: Practice) -> None:
    practice.cloud.control("quota", family="StandardNCADSA100v4Family", cores=48)
    words = "3 nodes need 72 cores, and the quota StandardNCADSA100v4Family is 48 (QuotaTooSmall)"
    assert "ml.azure.com/quota" in practice.one("sizes", "warning", words)["remedy"]
    practice.cloud.control("quota", family="StandardNCadsH100v5Family", cores=0)
    assert [line["verdict"] for line in practice.wrong("sizes")] == ["warning", "warning", "missing"]
    few = practice.lines("--nodes", "2")  # of which the first size suffices for
    assert [line["verdict"] for line in few if line["check"] == "sizes"] == ["ok", "warning", "ok"]


@pytest.mark.parametrize(
    ("workspace", "public_ip", "verdict"),
    [
        ({}, "1", "ok"),
        ({"publicNetworkAccess": "Disabled"}, "1", "missing"),
        ({"managedNetwork": {"isolationMode": "AllowOnlyApprovedOutbound"}}, "0", "ok"),
    ],
)
def test_nodes_without_a_subnet(practice: Practice, workspace: dict[str, Any], public_ip: str, verdict: str) -> None:
    practice.cloud.control("around", workspace=workspace)
    practice.setenv("DTRAIN_AZURE_OPTIONS", options(subnet="", public_ip=public_ip))
    lines = practice.lines(code=int(verdict == "missing"))
    assert [line["verdict"] for line in lines if line["check"] == "network"] == [verdict]


def test_packages_that_are_not_installed(practice: Practice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "azure.ai.ml", None)
    assert practice.one("settings", "missing", "azure.ai.ml")["remedy"] == "`pip install 'dtrain[azure]'`"
