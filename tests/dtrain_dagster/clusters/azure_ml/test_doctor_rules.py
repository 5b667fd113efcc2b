"""The doctor's decisions, without anybody to ask."""

from __future__ import annotations

import base64
import datetime
import json
from typing import Any

import pytest

from dtrain_dagster.clusters.azure_ml import doctor
from dtrain_dagster.clusters.azure_ml.client import ServiceRefused
from dtrain_dagster.clusters.azure_ml.doctor import DoctorLine, doctor_text, exit_code_of
from dtrain_dagster.clusters.azure_ml.doctor_reader import claims_of
from dtrain_dagster.clusters.azure_ml.options import AzureMLOptions
from dtrain_dagster.clusters.azure_ml.sku_chain import Quota, Size, SkuChoice
from trainer.runtime.network_refusal import NETWORK_REMEDY

OPTIONS = AzureMLOptions(
    subscription_id="00000000-0000-4000-8000-000000000001", resource_group="group", workspace="ws",
    storage_uri="az://dtrain",
)  # fmt: skip
SIZE = Size(sku="Standard_NC24ads_A100_v4", family="A100", vcpus=24, gpus=1, low_priority_capable=False)
SIZES = {SIZE.sku.casefold(): SIZE, "standard_nc6s_v3": SIZE}
QUOTAS = [Quota(name="A100", used=24, limit=96)]


def test_a_token_is_read_and_nothing_else_is_taken_for_one() -> None:
    claims = {"oid": "me", "appid": "app"}
    middle = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    assert claims_of(f"head.{middle}.tail") == claims
    for text in ("", "opaque", "a.b.c", "a.W10.c"):
        assert claims_of(text) == {}


@pytest.mark.parametrize(
    ("granted", "excluded", "missing"),
    [
        (["*"], [], []),
        (["microsoft.x/ws/*/READ"], [], ["Microsoft.X/ws/jobs/write"]),
        (["Microsoft.X/ws/*"], ["Microsoft.X/ws/jobs/*"], ["Microsoft.X/ws/jobs/write"]),
        ([], [], ["Microsoft.X/ws/computes/read", "Microsoft.X/ws/jobs/write"]),
    ],
)
def test_wildcards_of_roles(granted: list[str], excluded: list[str], missing: list[str]) -> None:
    needed = ["Microsoft.X/ws/computes/read", "Microsoft.X/ws/jobs/write"]
    assert doctor.missing_operations(needed, [{"actions": granted, "notActions": excluded}]) == missing


@pytest.mark.parametrize(
    ("pattern", "granted"),
    [("A/ws/*/read", True), ("A/*/read", True), ("A/ws/*", True), ("A/ws/*/write", False), ("A/w*s/r", False)],
)
def test_a_wildcard_between_slashes_may_stand_for_nothing(pattern: str, granted: bool) -> None:
    assert (doctor.missing_operations(["A/ws/read"], [{"actions": [pattern]}]) == []) is granted


def test_what_one_role_excludes_another_may_grant() -> None:
    roles: list[dict[str, Any]] = [{"actions": ["*"], "notActions": ["*/write"]}, {"actions": ["A/b/write"]}]
    assert doctor.missing_operations(["A/b/write", "A/c/write"], roles) == ["A/c/write"]


def test_an_operation_that_azure_names_is_the_one_that_is_told() -> None:
    words = "does not have authorization to perform action 'A/b/read' over scope '/c'"
    error = ServiceRefused("all of it", words, "AuthorizationFailed", 403, None)
    line = doctor.judge_refused_read("roles", "A/other/read", error, "/s/workspaces/ws", "me")
    assert line.seen.startswith("A/b/read is not allowed")
    assert '--role "dtrain orchestrates (<prefix>)" --scope /s/workspaces/ws' in line.command


@pytest.mark.parametrize(
    ("said", "command"),
    [
        ("there is no such container: create it", "az storage container create --auth-mode login --account-name team"),
        ("give it a role", "az role assignment create --assignee me "),
        (NETWORK_REMEDY, "nslookup team.blob.core.windows.net"),
    ],
)
def test_what_is_wrong_with_storage_has_its_own_command(said: str, command: str) -> None:
    account = "https://team.blob.core.windows.net"
    line = doctor.judge_storage_error(OSError(said), "write", "az://dtrain/x", account, "me")
    assert line.command.startswith(command)


@pytest.mark.parametrize(
    ("sku", "tier", "nodes", "today", "verdict", "seen"),
    [
        (SIZE.sku, "dedicated", 3, "2026-01-01", "ok", "need 72 cores; A100 has 72 free of 96"),
        (SIZE.sku, "dedicated", 4, "2026-01-01", "warning", "need 96 cores"),
        (SIZE.sku, "spot", 1, "2026-01-01", "warning", "not offered as Spot nodes"),
        ("Standard_NC40ads_H100_v5", "dedicated", 1, "2026-01-01", "warning", "is not among the 2 sizes"),
        ("Standard_NC6s_v3", "dedicated", 1, "2025-09-30", "warning", "retired on 2025-09-30"),
        ("Standard_NC6s_v3", "dedicated", 1, "2025-09-29", "ok", "it retires on 2025-09-30"),
    ],
)
def test_choices(sku: str, tier: str, nodes: int, today: str, verdict: str, seen: str) -> None:
    choice = SkuChoice(sku=sku, tier=tier)
    line = doctor.judge_choice(choice, SIZES, QUOTAS, nodes, 1, datetime.date.fromisoformat(today), "list them")
    assert line.verdict == verdict
    assert seen in line.seen
    assert bool(line.remedy) is (verdict != "ok")


def test_a_registry_behind_a_firewall_is_explained_as_network() -> None:
    said = '{"errors":[{"code":"DENIED","message":"client with IP \'203.0.113.7\' is not allowed doctor."}]}'
    line = doctor.judge_image("team.azurecr.io/a:1", 403, said, "me")
    assert line.verdict == "missing"
    assert "not a missing role" in line.remedy


@pytest.mark.parametrize(
    ("own", "fields", "verdict"),
    [
        ({}, {}, "missing"),
        ({}, {"public_ip": True}, "ok"),
        ({"publicNetworkAccess": "Disabled"}, {"public_ip": True}, "missing"),
        ({"managedNetwork": {"isolationMode": "AllowOnlyApprovedOutbound"}}, {}, "ok"),
    ],
)
def test_nodes_without_a_subnet(own: dict[str, Any], fields: dict[str, Any], verdict: str) -> None:
    options = AzureMLOptions(
        subscription_id=OPTIONS.subscription_id, resource_group="group", workspace="ws", storage_uri="az://d", **fields
    )
    assert doctor.judge_no_subnet({"properties": own}, options).verdict == verdict


def test_ci_is_told_by_the_exit_code_and_people_by_the_last_line() -> None:
    lines = [DoctorLine("a", "ok", "well"), DoctorLine("b", "warning", "hm")]
    assert exit_code_of(lines) == 0
    bad = [*lines, DoctorLine("c", "missing", "gone", "find it", "look")]
    assert exit_code_of(bad) == 1
    text = doctor_text(bad).splitlines()
    assert text[2:5] == ["missing c           gone", f"{'':20}→ find it", f"{'':20}$ look"]
    assert text[-1].startswith("1 missing, 1 warnings. Nothing was bought")
