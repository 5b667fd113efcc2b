"""The emulator's computes, sizes, quota, identity and faults, asked by the real SDK over real TLS."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from dtrain_dagster.clusters.azure_ml.refusals import classify_refusal, error_body_of
from tests.azure.emulator import Emulator
from tests.azure.emulator.foreign import ATTACHED, UNKNOWN
from tests.azure.emulator.refused import NESTINGS
from tests.azure.emulator.state import CONTAINER

pytestmark = pytest.mark.slow
SIZE = "Standard_NC6s_v3"


@pytest.fixture(autouse=True)
def _no_faults_left(emulator: Emulator) -> Iterator[None]:
    timing = emulator.control("timing")
    yield
    emulator.control("clear")
    emulator.control("timing", **timing)
    # Quotas count live nodes: what a test bought must not be in the way of the next.
    emulator.control("clock", advance_seconds=3600)


def compute(name: str, **more: Any) -> Any:
    from azure.ai.ml.entities import AmlCompute

    settings: dict[str, Any] = {
        "size": SIZE,
        "min_instances": 0,
        "max_instances": 3,
        "idle_time_before_scale_down": 600,
    } | more
    return AmlCompute(name=name, **settings)


def raw(emulator: Emulator, path: str, token: str | None) -> requests.Response:
    base = emulator.environment["ARM_CLOUD_METADATA_URL"].partition("/metadata")[0]
    subscription, group = (emulator.environment[f"DTRAIN_AZURE_{n}"] for n in ("SUBSCRIPTION_ID", "RESOURCE_GROUP"))
    where = f"/subscriptions/{subscription}/resourceGroups/{group}"
    where += "/providers/Microsoft.MachineLearningServices/workspaces"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    ca = emulator.environment["REQUESTS_CA_BUNDLE"]
    return requests.get(f"{base}{where}/{path}", headers=headers, verify=ca, timeout=30)


def arm_token(emulator: Emulator, resource: str | None = None) -> str:
    base = emulator.environment["ARM_CLOUD_METADATA_URL"].partition("/metadata")[0]
    answer = requests.get(
        emulator.environment["IDENTITY_ENDPOINT"],
        params={"resource": resource or base},
        headers={"X-IDENTITY-HEADER": emulator.environment["IDENTITY_HEADER"]},
        timeout=30,
    )
    return str(answer.json()["access_token"])


def test_a_compute_is_created_as_it_was_asked_for(client: Any) -> None:
    from azure.ai.ml.entities import IdentityConfiguration, ManagedIdentityConfiguration, NetworkSettings

    group = f"/subscriptions/{uuid.uuid4()}/resourceGroups/net"
    identity = f"{group}/providers/Microsoft.ManagedIdentity/userAssignedIdentities/trainer"
    subnet = f"{group}/providers/Microsoft.Network/virtualNetworks/v/subnets/gpus"
    asked = compute(
        "asked-for",
        tier="low_priority",
        enable_node_public_ip=False,
        network_settings=NetworkSettings(subnet=subnet),
        identity=IdentityConfiguration(
            type="user_assigned", user_assigned_identities=[ManagedIdentityConfiguration(resource_id=identity)]
        ),
        tags={"run": "r1"},
    )
    made = client.compute.begin_create_or_update(asked).result()
    assert (made.provisioning_state, made.size, made.tier) == ("Succeeded", "STANDARD_NC6S_V3", "low_priority")
    assert (made.min_instances, made.max_instances, made.idle_time_before_scale_down) == (0, 3, 600)
    assert made.enable_node_public_ip is False
    assert made.network_settings.subnet == subnet
    assert made.identity.user_assigned_identities[0].resource_id == identity
    assert made.tags == {"run": "r1"}
    assert list(client.compute.list_nodes("asked-for")) == []


def test_what_nodes_there_are_is_null_while_it_is_created(emulator: Emulator, client: Any) -> None:
    emulator.control("timing", create_seconds=60)
    poller = client.compute.begin_create_or_update(compute("null-yet"))
    path = f"{emulator.environment['DTRAIN_AZURE_WORKSPACE']}/computes/null-yet"
    seen = raw(emulator, path, arm_token(emulator)).json()["properties"]
    assert seen["provisioningState"] == "Creating"
    nulls = ("allocationState", "nodeStateCounts", "currentNodeCount", "targetNodeCount")
    assert {name: seen["properties"][name] for name in nulls} == dict.fromkeys(nulls)
    assert not poller.done()
    emulator.control("clock", advance_seconds=60)
    poller.result()
    seen = raw(emulator, path, arm_token(emulator)).json()["properties"]
    assert seen["properties"]["allocationState"] == "Steady"
    assert seen["properties"]["nodeStateCounts"]["idleNodeCount"] == 0


def test_idle_nodes_are_paid_for_until_the_clock_releases_them(emulator: Emulator, client: Any) -> None:
    made = client.compute.begin_create_or_update(compute("idle", min_instances=2)).result()
    emulator.control("clock", advance_seconds=60)
    made.min_instances = 0
    client.compute.begin_update(made).result()
    emulator.control("clock", advance_seconds=500)
    assert [node.nodeState for node in client.compute.list_nodes("idle")] == ["idle", "idle"], "not for 600 s yet"
    emulator.control("clock", advance_seconds=1000)
    assert list(client.compute.list_nodes("idle")) == []
    bought = emulator.control("bought")
    assert bought["alive_nodes"] == 0
    assert 20 <= bought["computes"]["idle"] < 22, "two nodes, ten minutes and no more"
    emulator.control("clock", advance_seconds=86400)
    assert emulator.control("bought")["computes"]["idle"] == bought["computes"]["idle"]


def test_a_size_that_is_refused_at_once_leaves_nothing(emulator: Emulator, client: Any) -> None:
    from azure.core.exceptions import ResourceExistsError, ResourceNotFoundError

    emulator.control("fault", fault="refuse", vm_size=SIZE, how="sync")
    with pytest.raises(ResourceExistsError, match="SkuNotAvailable"):
        client.compute.begin_create_or_update(compute("refused"))
    with pytest.raises(ResourceNotFoundError):
        client.compute.get("refused")


def test_a_size_that_is_refused_later_leaves_a_failed_compute(emulator: Emulator, client: Any) -> None:
    from azure.core.exceptions import HttpResponseError, ResourceNotFoundError

    emulator.control("fault", fault="refuse", vm_size="Standard_NC*", tier="low_priority", how="async", code="NoRoom")
    poller = client.compute.begin_create_or_update(compute("leftover", tier="low_priority"))
    with pytest.raises(HttpResponseError, match="NoRoom") as caught:
        poller.result()
    assert caught.value.status_code == 200
    left = client.compute.get("leftover")
    assert (left.provisioning_state, left.provisioning_errors) == ("Failed", "NoRoom")
    client.compute.begin_delete("leftover").wait()
    with pytest.raises(ResourceNotFoundError):
        client.compute.get("leftover")


@pytest.mark.parametrize("nesting", NESTINGS)
def test_a_refusal_is_wrapped_as_the_service_wraps_it(emulator: Emulator, client: Any, nesting: str) -> None:
    from azure.core.exceptions import HttpResponseError

    emulator.control("fault", fault="refuse", vm_size=SIZE, how="async", nesting=nesting)
    with pytest.raises(HttpResponseError) as caught:
        client.compute.begin_create_or_update(compute(f"wrapped-{nesting}")).result()
    top = "AllocationFailed" if nesting == "flat" else "UserError" if nesting == "info" else "BadRequest"
    assert caught.value.error is not None
    assert caught.value.error.code == top
    assert classify_refusal(error_body_of(caught.value), 200).code == "AllocationFailed"
    client.compute.begin_delete(f"wrapped-{nesting}").wait()


def test_quota_is_told_and_kept(emulator: Emulator, client: Any) -> None:
    from azure.core.exceptions import HttpResponseError

    family = next(size.family for size in client.compute.list_sizes() if size.name == SIZE)
    emulator.control("quota", family=family, cores=5)  # a node has 6, and a minimum of 0 nodes does not help
    own = [one for one in client.compute.list_usage() if one.name and one.name["value"] == family]
    dedicated, low = sorted(own, key=lambda one: str(one.type))
    assert (dedicated.limit, dedicated.currentValue, low.limit) == (5, 0, -1)
    with pytest.raises(HttpResponseError, match=r"family vCPU quota of 5 and cannot accomodate .* 6 vCPUs") as caught:
        client.compute.begin_create_or_update(compute("no-quota")).result()
    assert caught.value.status_code == 200, "the creation was accepted, and failed"
    assert client.compute.get("no-quota").provisioning_errors == "ClusterMinNodesExceedCoreQuota"
    client.compute.begin_delete("no-quota").wait()
    emulator.control("quota", family=family, cores=13)
    client.compute.begin_create_or_update(compute("some-quota", min_instances=2)).result()
    with pytest.raises(HttpResponseError, match="ClusterMinNodesExceedCoreQuota"):
        client.compute.begin_create_or_update(compute("more-quota", min_instances=3)).result()
    client.compute.begin_delete("more-quota").wait()
    listed = [one for one in client.compute.list_usage() if one.name and one.name["value"] == family]
    assert sorted(one.currentValue for one in listed) == [0, 12]
    client.compute.begin_delete("some-quota").wait()
    for total, tier in (("dedicated", "dedicated"), ("low_priority", "low_priority")):
        emulator.control("clear")
        emulator.control("quota", family=total, cores=0)
        with pytest.raises(HttpResponseError, match="total vCPU quota of 0"):
            client.compute.begin_create_or_update(compute(f"none-{total.replace('_', '-')}", tier=tier)).result()
        client.compute.begin_delete(f"none-{total.replace('_', '-')}").wait()


def test_usages_have_totals_and_each_family_twice_and_nulls(client: Any) -> None:
    rows = list(client.compute.list_usage())
    names = [one.name["value"] for one in rows if one.name]
    assert {"TotalClusters", "TotalDedicatedCores", "TotalLowPriorityCores"} < set(names)
    assert names.count("standardNCSv3Family") == 2
    assert [one for one in rows if one.limit is None]
    assert [one for one in rows if not one.name]


def test_a_change_is_answered_as_a_creation(emulator: Emulator, client: Any) -> None:
    made = client.compute.begin_create_or_update(compute("changed")).result()
    made.max_instances, made.network_settings = 5, None
    assert client.compute.begin_create_or_update(made).result().max_instances == 5
    asked = [one for one in emulator.control("requests", operation="compute.put") if one["path"].endswith("/changed")]
    assert [one["status"] for one in asked] == [201, 201]
    assert asked[1]["body"]["properties"]["properties"]["vmSize"] == "STANDARD_NC6S_V3", "in any case of letters"


@pytest.mark.parametrize("size", ["Standard_NC40ads_H100_v5", "Standard_NC64as_T4_v3"])
def test_a_size_without_a_low_priority_tier_is_made_and_gets_no_node(
    emulator: Emulator, client: Any, size: str
) -> None:
    name = f"never-{size[9:13].lower()}"
    made = client.compute.begin_create_or_update(
        compute(name, size=size, tier="low_priority", min_instances=1)
    ).result()
    assert (made.provisioning_state, made.provisioning_errors) == ("Succeeded", None)
    emulator.control("clock", advance_seconds=600)
    assert not list(client.compute.list_nodes(name))
    seen = raw(emulator, f"{emulator.environment['DTRAIN_AZURE_WORKSPACE']}/computes/{name}", arm_token(emulator))
    [told] = seen.json()["properties"]["properties"]["errors"]
    assert told["error"]["code"] == "UnsupportedVMSizeForLowPriority"
    client.compute.begin_delete(name).wait()


def test_a_size_for_endpoints_alone_is_listed_and_refused(client: Any) -> None:
    from azure.core.exceptions import HttpResponseError

    listed = {size.name: size.supportedComputeTypes for size in client.compute.list_sizes()}
    assert listed["Standard_NV36ads_A10_v5"] == ["MIR"]
    with pytest.raises(HttpResponseError) as caught:
        client.compute.begin_create_or_update(compute("a10", size="Standard_NV36ads_A10_v5")).result()
    refusal = classify_refusal(error_body_of(caught.value), 200)
    assert (refusal.code, refusal.verdict) == ("InvalidPropertyValue", "next")
    client.compute.begin_delete("a10").wait()


def test_computes_of_others_are_there_in_every_kind(emulator: Emulator) -> None:
    listed = raw(emulator, f"{emulator.environment['DTRAIN_AZURE_WORKSPACE']}/computes", arm_token(emulator)).json()
    kinds = {one["properties"]["computeType"] for one in listed["value"]}
    assert {*ATTACHED, UNKNOWN, "ComputeInstance", "AmlCompute"} <= kinds


def test_sizes_carry_their_recorded_prices_among_those_of_windows(client: Any) -> None:
    from dtrain_dagster.costs.meters import choose_size_price
    from dtrain_dagster.registry.azure_operations import usd_per_hour

    sizes = {size.name: size for size in client.compute.list_sizes()}
    rows = [(row["osType"], row["vmTier"], row["retailPrice"]) for row in sizes[SIZE].estimatedVMPrices["values"]]
    assert [row for row in rows if row[:2] == ("Linux", "Standard")] == [
        ("Linux", "Standard", 3.34), ("Linux", "Standard", 3.06),
    ]  # fmt: skip
    assert choose_size_price(rows) == usd_per_hour(client, SIZE) == 3.06
    assert choose_size_price(rows, "spot") is None
    assert sizes["Standard_ND96isr_H100_v5"].gpus == 8


@pytest.mark.parametrize(
    "fault",
    [
        {"fault": "throttle", "retry_after_seconds": 0.1, "count": 2},
        {"fault": "error", "status": 503, "count": 2},
        {"fault": "error", "status": 500, "moment": "after"},
        {"fault": "drop"},
        {"fault": "drop", "moment": "after"},
        {"fault": "slow", "seconds": 0.2},
    ],
    ids=lambda fault: "-".join(map(str, fault.values())),
)
def test_a_request_that_fails_is_repeated_by_the_sdk_and_buys_once(
    emulator: Emulator, client: Any, fault: dict[str, Any]
) -> None:
    name = f"once-{len(emulator.control('state')['computes'])}x"
    before = len(emulator.control("requests", operation="compute.put"))
    emulator.control("fault", operation="compute.put", **fault)
    client.compute.begin_create_or_update(compute(name)).result()
    assert client.compute.get(name).provisioning_state == "Succeeded"
    asked = emulator.control("requests", operation="compute.put")[before:]
    struck = fault.get("count", 1)
    assert [one["fault"] for one in asked[:struck]] == [fault["fault"]] * struck
    repeated = fault["fault"] != "slow"
    assert len(asked) == struck + repeated


def test_an_operation_that_is_stuck_never_ends(emulator: Emulator, client: Any) -> None:
    emulator.control("fault", fault="stuck", operation="compute.create")
    poller = client.compute.begin_create_or_update(compute("stuck"))
    emulator.control("clock", advance_seconds=86400)
    poller.wait(0.5)
    assert not poller.done()
    assert client.compute.get("stuck").provisioning_state == "Creating"
    client.compute.begin_delete("stuck").wait()


def test_nothing_is_told_without_the_right_token(emulator: Emulator) -> None:
    workspace = emulator.environment["DTRAIN_AZURE_WORKSPACE"]
    assert raw(emulator, workspace, arm_token(emulator)).ok
    assert raw(emulator, workspace, None).status_code == 401
    assert raw(emulator, workspace, arm_token(emulator)[:-4] + "AAAA").status_code == 401
    for_storage = arm_token(emulator, "https://storage.azure.com")
    assert raw(emulator, workspace, for_storage).status_code == 401
    assert raw(emulator, "another-workspace", arm_token(emulator)).status_code == 404
    refused = requests.get(emulator.environment["IDENTITY_ENDPOINT"], params={"resource": "x"}, headers={}, timeout=30)
    assert refused.status_code == 401


def test_storage_takes_the_identity_and_nothing_less(emulator: Emulator, client: Any) -> None:
    from azure.core.exceptions import ClientAuthenticationError, HttpResponseError
    from azure.identity import DefaultAzureCredential
    from azure.storage.blob import BlobServiceClient

    url, container = emulator.environment["AZURE_STORAGE_ACCOUNT_URL"], CONTAINER
    with BlobServiceClient(url, DefaultAzureCredential()) as account:
        account.get_blob_client(container, "who").upload_blob(b"me")
        assert account.get_blob_client(container, "who").download_blob().readall() == b"me"
    with BlobServiceClient(url) as nobody, pytest.raises((ClientAuthenticationError, HttpResponseError)):
        nobody.get_blob_client(container, "who").download_blob()


def test_the_control_port_says_what_it_does_not_know(emulator: Emulator) -> None:
    with pytest.raises(ValueError, match="there are: clock"):
        emulator.control("explode")
    with pytest.raises(ValueError, match="no timing 'lunch'"):
        emulator.control("timing", lunch=1)


def test_the_folder_for_a_person_is_complete(emulator: Emulator) -> None:
    written = (emulator.folder / "azure.env").read_text()
    assert all(f"export {name}=" in written for name in emulator.environment)
    assert (emulator.folder / "azure.env").stat().st_mode & 0o077 == 0
