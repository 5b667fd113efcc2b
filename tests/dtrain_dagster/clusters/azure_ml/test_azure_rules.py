"""What is decided without asking anybody: which nodes to try, what a refusal means, what to make of a launch."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.azure_ml import launch_record, manager
from dtrain_dagster.clusters.azure_ml.client import Service
from dtrain_dagster.clusters.azure_ml.jobs import (
    JOB_TAG,
    LAUNCH_TAG,
    RUN_DIR_TAG,
    RUN_TAG,
    command_line,
    parse_time,
)
from dtrain_dagster.clusters.azure_ml.manager import AzureMLClusterManager, busy, refuse_secrets
from dtrain_dagster.clusters.azure_ml.provision import CLUSTER_TAG, Compute, Provisioner, describe_compute, read_compute
from dtrain_dagster.clusters.azure_ml.sku_chain import (
    DEFAULT_CHAIN,
    DEFAULT_CHAINS,
    NO_QUOTA_SECONDS,
    Quota,
    Size,
    SkuChoice,
    chain,
    compute_name,
    examine,
    fold_name,
)
from dtrain_dagster.clusters.azure_ml.states import (
    CANCEL_NOT_FOUND,
    WAS_THERE,
    JobDecision,
    JobFacts,
    ServiceJob,
    decide_job,
    note_look,
)
from dtrain_dagster.clusters.base import OWNER, ClusterError, JobSpec
from dtrain_dagster.costs.prices import hardware_of
from dtrain_dagster.settings.azure import AzureMLOptions
from dtrain_dagster.settings.environment import BUYABLE_GPU_TYPE
from dtrain_dagster.support.audit import AuditError, AuditLog, note_request_id, noted_request_id
from dtrain_dagster.support.user_code import stage_for_nodes
from dtrain_dagster.support.user_sources import StagingError
from harness.azure.emulator.state import read_sizes
from trainer.rundir import LAUNCH, RunDir

V100 = SkuChoice(sku="Standard_NC6s_v3", tier="dedicated")
SIZES = {
    "standard_nc6s_v3": Size(
        sku="Standard_NC6s_v3", family="standardNCSv3Family", vcpus=6, gpus=1, low_priority_capable=True
    ),
    "standard_nc64as_t4_v3": Size(
        sku="Standard_NC64as_T4_v3", family="Standard NCASv3_T4 Family", vcpus=64, gpus=4, low_priority_capable=False
    ),
}


def options(**fields: Any) -> AzureMLOptions:
    required = {
        "subscription_id": "00000000-0000-4000-8000-000000000001", "resource_group": "group", "workspace": "space",
        "storage_uri": "az://dtrain", "image": "",
    }  # fmt: skip
    return AzureMLOptions(**{**required, **fields})


def test_nodes_that_have_a_job_are_at_work_in_whatever_state_they_are() -> None:
    nodes = [("n1", "idle", None), ("n2", "preparing", None), ("n3", "leaving", "job-1"), ("n4", "running", None)]
    assert busy(nodes) == ["job-1", "n4"]
    assert busy(nodes, ("running", "preparing")) == ["n2", "job-1", "n4"]


def test_the_chain_starts_with_the_wanted_size_and_goes_tier_by_tier_without_what_was_waited_for_in_vain() -> None:
    found = chain("B", ("A", "B"), ("dedicated", "low_priority"), {SkuChoice(sku="A", tier="spot")})
    assert [(choice.sku, choice.tier) for choice in found] == [("B", "dedicated"), ("A", "dedicated"), ("B", "spot")]


def test_the_default_chains_hold_every_kind_that_can_be_bought_for_training() -> None:
    assert all(kind in " ".join(DEFAULT_CHAIN) for kind in ("A100", "H100", "T4"))
    assert DEFAULT_CHAIN[0] == BUYABLE_GPU_TYPE
    for gpus, skus in DEFAULT_CHAINS.items():
        recorded = [read_sizes()[sku] for sku in skus]
        assert all("AmlCompute" in row.compute_types and row.gpus == gpus for row in recorded)
        assert all(hardware_of(sku).retired_on is None for sku in skus)


FAMILY = "standardNCSv3Family"
KIND = "Microsoft.MachineLearningServices/vmFamily/{}/usages"
T4 = SkuChoice(sku="Standard_NC64as_T4_v3", tier="dedicated")
SPOT = SkuChoice(sku=V100.sku, tier="spot")
SPOT_TOTALS = ("TotalLowPriorityCores", "lowPriorityCores", "Total Regional Spot vCPUs")
ENDPOINTS_ONLY = {"standard_nc6s_v3": dataclasses.replace(SIZES["standard_nc6s_v3"], compute_types=("MIR",))}


def quota(used: int, limit: int, name: str = FAMILY, kind: str = "") -> Quota:
    return Quota(name=name, used=used, limit=limit, kind=kind)


BOTH_TIERS = [
    quota(0, 100, kind=KIND.format("dedicatedCores")),
    quota(0, 6, kind=KIND.format("lowPriorityCores")),
]


@pytest.mark.parametrize(
    ("choice", "quotas", "more", "code"),
    [
        (V100, [quota(0, 18)], {}, None),
        (V100, [quota(0, 17)], {}, "QuotaTooSmall"),
        (V100, [quota(1, 18)], {}, "QuotaInUse"),
        (V100, [quota(18, 18)], {"nodes_there": 3}, None),
        (V100, [quota(0, -1)], {}, None),
        # Names of families are compared by letters and digits.
        (T4, [quota(0, 0, "standardNCASv3_T4Family")], {}, "QuotaTooSmall"),
        # The total of all families counts, too, on its own tier, under each of its names.
        *((SPOT, [quota(0, 0), quota(0, 100, name)], {}, None) for name in SPOT_TOTALS),
        *((SPOT, [quota(90, 100, name)], {}, "QuotaInUse") for name in SPOT_TOTALS),
        *((V100, [quota(0, 0, name)], {}, None) for name in SPOT_TOTALS),
        (V100, [quota(0, 100), quota(0, 17, "TotalDedicatedCores")], {}, "QuotaTooSmall"),
        (V100, [quota(0, 100), quota(0, 17, "Total Cluster Dedicated Regional vCPUs")], {}, "QuotaTooSmall"),
        # What is too small for ever is told before what is in use now.
        (V100, [quota(18, 18), quota(0, 17, "TotalDedicatedCores")], {}, "QuotaTooSmall"),
        (V100, [quota(0, 17, "TotalDedicatedCores"), quota(18, 18)], {}, "QuotaTooSmall"),
        # Recorded: a family has one row of dedicated and one of Spot cores ("low-priority"), under the same name.
        (V100, BOTH_TIERS, {}, None),
        (SPOT, BOTH_TIERS, {}, "QuotaTooSmall"),
        (SkuChoice(sku="Standard_ND96", tier="dedicated"), [], {}, "SkuNotListed"),
        (dataclasses.replace(T4, tier="low_priority"), [], {}, "NoLowPriority"),
        (V100, [], {"processes_per_node": 2}, "TooFewGpus"),
        (V100, [], {"sizes": ENDPOINTS_ONLY}, "NotForClusters"),
    ],
)
def test_a_choice_that_no_quota_or_offer_covers_is_not_asked_for(
    choice: SkuChoice, quotas: list[Quota], more: dict[str, Any], code: str | None
) -> None:
    known = {"sizes": SIZES, "node_count": 3, "nodes_there": 0, "processes_per_node": 1} | more
    refusal = examine(choice, quotas=quotas, **known)
    assert (refusal.code if refusal else None) == code
    assert refusal is None or (refusal.retry_seconds == NO_QUOTA_SECONDS) is (code != "QuotaInUse")


def test_a_usage_without_a_name_a_limit_or_a_value_is_survived() -> None:
    rows: list[dict[str, Any]] = [
        {"name": None, "limit": 5, "currentValue": 0},
        {"name": {"value": FAMILY, "localizedValue": None}, "limit": None, "currentValue": 0},
        {"name": {"value": FAMILY}, "limit": 7, "currentValue": None},
    ]
    assert [Quota.read(row) for row in rows] == [None, None, quota(0, 7)]


@pytest.mark.parametrize("name", ["dtrain", "a" * 12])
@pytest.mark.parametrize("sku", [*DEFAULT_CHAIN, "Standard_ND96isr_MI300X_v5_and_more"])
@pytest.mark.parametrize("tier", ["dedicated", "spot"])
def test_names_of_computes_fit_the_service(name: str, sku: str, tier: str) -> None:
    made = compute_name(name, SkuChoice(sku=sku, tier=tier))
    assert re.fullmatch(r"[a-zA-Z](?![a-zA-Z0-9-]*-\d+$)[a-zA-Z0-9-]{2,23}", made)  # as ARM checks it
    options(cluster_name=name)


def test_a_computes_name_is_shortened_only_where_it_must_and_two_sizes_never_share_one() -> None:
    def named(sku: str, tier: str = "dedicated") -> str:
        return compute_name("dtrain", SkuChoice(sku=f"Standard_{sku}", tier=tier))

    assert named("NC6s_v3") == "dtrain-nc6sv3"
    assert named("n" * 17) == "dtrain-" + "n" * 17, "24 characters"
    assert named("n" * 14, "spot") == "dtrain-" + "n" * 14 + "-lp"
    long = {named("n" * 18), named("n" * 17 + "b")}
    assert len(long) == 2
    assert {(name[:-4], len(name)) for name in long} == {("dtrain-" + "n" * 13, 24)}


@pytest.mark.parametrize(("tier", "word"), [("dedicated", "Dedicated"), ("spot", "LowPriority")])
def test_the_service_is_told_its_own_word_for_spot(tier: str, word: str) -> None:
    pytest.importorskip("azure.ai.ml")
    choice = SkuChoice(sku="Standard_NC4as_T4_v3", tier=tier)
    made = describe_compute(options(), choice, "dtrain-nc4ast4v3", 2)
    sent = {"name": made.name, **made._to_rest_object().as_dict()}
    assert fold_name(sent["properties"]["properties"]["vmPriority"]) == fold_name(word)
    assert read_compute(sent).tier == tier
    assert SkuChoice(sku="Standard_NC4as_T4_v3", tier="low_priority") == dataclasses.replace(choice, tier="spot")


def test_making_a_manager_asks_nobody_and_imports_no_client(tmp_path: Path) -> None:
    script = f"""
        import sys
        from pathlib import Path
        from dtrain_dagster.clusters.azure_ml.manager import AzureMLClusterManager
        from dtrain_dagster.settings.azure import AzureMLOptions
        AzureMLClusterManager(AzureMLOptions(
            subscription_id="00000000-0000-4000-8000-000000000001", resource_group="g", workspace="w",
            storage_uri="az://dtrain", image="",
        ), Path({str(tmp_path)!r}))
        print([name for name in sys.modules if name.split(".")[0] in ("azure", "requests", "torch", "mlflow")])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


PREEMPTED = "AzureMLCompute job failed. PreemptionError: Nodes of this job got pre-empted. Reason: Received warning."
PATIENCE = options(
    queue_deadline_seconds=100,
    allocation_patience_seconds=50,
    silence_seconds=30,
    start_seconds=10,
    missing_seconds=180,
)


RECORD = {
    **{"job_name": "j-l2", "launch": 2, "node_count": 3, "elastic": True, "submitted_at": 900.0, "confirmed": True},
    **{"missing_since": None, "cancel_asked_at": None, "stopping": "", "nodes_ready": None},
}


def facts(status: str, **fields: Any) -> JobFacts:
    """Return the facts about a launch. ``fields``: of `JobFacts`, of its record, and the ``error`` and its ``code``."""
    job = ServiceJob(status=status, error_message=fields.pop("error", ""), error_code=fields.pop("code", ""))
    record = RECORD | {name: fields.pop(name) for name in RECORD if name in fields and name != "nodes_ready"}
    known = {"now": 1000.0, "phase_since": 990.0, "resubmissions_left": 1}
    return JobFacts(record=record, job=job, **{**known, **fields})


def decided(status: str, **fields: Any) -> tuple[str, str]:
    decision: JobDecision = decide_job(facts(status, **fields), PATIENCE)
    return decision.action, decision.state


DONE, FAILED, STOPPED, SPENT = (
    {"status": word, "launch": 2, "error": "why"} for word in ("succeeded", "failed", "stopped", "budget")
)
EARLIER = {"launch": 1}
SHORT = {"phase_since": 940.0, "allocation_error": "AllocationFailed"}
UNSEEN = {"confirmed": False, "cancel_asked_at": 1.0}
GONE = {"missing_since": 800.0, "cancel_answer": CANCEL_NOT_FOUND}
TAKEN = {"stopping": WAS_THERE}
LOSSES: tuple[dict[str, Any], ...] = (
    {"code": "PreemptionError", "error": "Nodes of this job got pre-empted"},
    {"error": "Execution failed. User process 'python' exited with status code 75."},
    {"error": "Process exited with code -9"},
    {"exit_codes": (137, 75)},
    {"vanished": (1,)},
    {"result": STOPPED},
)
DECISIONS: list[tuple[str, dict[str, Any], str, str]] = [
    # what waits is queued until its deadline, and less where its nodes cannot be had and others can
    *((word, {}, "report", "queued") for word in ("NotStarted", "Starting", "Provisioning", "Preparing", "Queued")),
    ("Queued", {"phase_since": 899.0}, "stop", "queued"),
    ("Queued", SHORT, "report", "queued"),
    ("Queued", {**SHORT, "has_alternative": True}, "stop", "queued"),
    ("Paused", {}, "report", "queued"),
    ("Paused", {"phase_since": 800.0}, "stop", "queued"),
    ("Paused", {**SHORT, "has_alternative": True}, "report", "queued"),  # it has its nodes
    # what works is running; one that the service does not hear is believed by its nodes
    ("Running", {"phase_since": 0.0}, "report", "running"),
    ("Finalizing", {"phase_since": 0.0}, "report", "running"),
    ("NotResponding", {}, "report", "running"),
    ("NotResponding", {"phase_since": 960.0}, "stop", "running"),
    ("NotResponding", {"phase_since": 960.0, "heard_at": 995.0}, "report", "running"),
    ("AWordThatIsNew", {}, "report", "running"),
    # the end is what the training says
    ("Completed", {"result": DONE}, "settle", "succeeded"),
    ("Failed", {"result": DONE, "error": PREEMPTED}, "settle", "succeeded"),
    ("Completed", {"result": None}, "settle", "failed"),
    ("Completed", {"result": DONE | EARLIER}, "settle", "failed"),
    ("Completed", {"elastic": False}, "settle", "succeeded"),
    ("Failed", {"result": FAILED, "error": PREEMPTED}, "settle", "failed"),
    # a launch that lost its nodes is followed by another, one that failed by itself is not
    *(("Failed", how, "next", "queued") for how in LOSSES),
    *(("Failed", {**how, "resubmissions_left": 0}, "settle", "failed") for how in LOSSES),
    *(("Failed", {**how, "elastic": False}, "settle", "failed") for how in LOSSES),
    *(("Failed", {**how, "cancel_asked_at": 1.0}, "settle", "cancelled") for how in LOSSES),
    ("Failed", {"exit_codes": (1,), "vanished": (0, 2)}, "settle", "failed"),
    # nor is one that has spent its budget
    *(
        (word, {"result": SPENT, "exit_codes": (77, 75), **why}, "settle", "failed")
        for word in ("Failed", "Canceled", "Completed")
        for why in ({}, {"error": PREEMPTED}, {"vanished": (1,)}, {"stopping": "silent"})
    ),
    ("Failed", {"result": SPENT | EARLIER, "error": PREEMPTED}, "next", "queued"),
    # cancelled from here or from elsewhere; the wish is repeated until the service has heard it
    ("Canceled", {"cancel_asked_at": 1.0}, "settle", "cancelled"),
    ("Canceled", {}, "settle", "cancelled"),
    ("Canceled", {"code": "PreemptionError"}, "next", "queued"),
    ("Canceled", {"stopping": "queued too long"}, "next", "queued"),
    *((it, {"cancel_asked_at": 1.0}, "cancel", "running") for it in ("Queued", "Running", "NotResponding", "Paused")),
    ("CancelRequested", {"cancel_asked_at": 1.0}, "report", "running"),
    # one that is being ended is not followed before it has ended
    ("Running", {"stopping": "silent"}, "stop", "queued"),
    ("CancelRequested", {"stopping": "silent"}, "report", "queued"),
    # never seen: it is being submitted, was not submitted, or need not be any more
    ("", {"confirmed": False, "submitted_at": 995.0}, "report", "queued"),
    ("", {"confirmed": False}, "submit", "queued"),
    ("", UNSEEN, "make_sure", "queued"),
    ("", {**UNSEEN, "cancel_answer": CANCEL_NOT_FOUND}, "settle", "cancelled"),
    # not there any more: looked at again, cancelled, and only then given up
    ("", {}, "wait", "running"),
    ("", {"missing_since": 820.5}, "wait", "running"),
    ("", {"cancel_asked_at": 1.0}, "cancel", "running"),
    *(
        ("", {"missing_since": 800.0, **more}, "make_sure", "running")
        for more in ({}, {"cancel_asked_at": 1.0}, {"stopping": "silent"}, {"result": DONE}, {"elastic": False})
    ),
    ("", GONE, "settle", "failed"),
    ("", {**GONE, "cancel_asked_at": 1.0}, "settle", "cancelled"),
    ("", {**GONE, "result": DONE}, "settle", "succeeded"),
    ("", {**GONE, "stopping": "queued too long"}, "next", "queued"),
    # the service took its cancellation, so it was there: it is waited for and gone on with, unless it failed before
    ("", TAKEN, "wait", "running"),
    ("CancelRequested", TAKEN, "report", "queued"),
    ("Canceled", TAKEN, "next", "queued"),
    ("Failed", {**TAKEN, "exit_codes": (1,)}, "settle", "failed"),
    ("Failed", {**TAKEN, "exit_codes": (137,)}, "next", "queued"),
]


def test_a_launch_is_decided_by_all_its_witnesses() -> None:
    wrong = [
        (word, seen, *decided(word, **seen)) for word, seen, *said in DECISIONS if [*decided(word, **seen)] != said
    ]
    assert wrong == []


NOT_HEARD = "the service says NotResponding; its nodes were last heard from 4 s ago"


@pytest.mark.parametrize(
    ("status", "seen", "says"),
    [
        ("Queued", {"nodes_ready": 2}, "has been waiting for nodes for 10 s, 2 of 3 nodes are there"),
        ("Queued", {}, "has been waiting for nodes for 10 s"),
        (
            "NotResponding",
            {"heard_at": 996.0},
            NOT_HEARD,
        ),
        ("Paused", {}, "has been paused by the service for 10 s"),
        ("Failed", {"result": SPENT, "error": PREEMPTED}, "why"),
        ("Failed", {"error": "exited with code 1"}, "exited with code 1"),
        ("Failed", {"exit_codes": (2, 75)}, "the service does not say why"),
        ("Failed", {"error": "no such image"}, "no such image"),
        ("", {**GONE, "result": FAILED}, "why"),
        ("", {**GONE, "result": SPENT}, "why"),
        (
            "",
            {**GONE, "cancel_answer": "refused: no role"},
            "the job was deleted from the workspace: the service has not known it for 200 s; its cancellation was "
            "refused: no role",
        ),
    ],
)
def test_a_decision_says_why(status: str, seen: dict[str, Any], says: str) -> None:
    assert decide_job(facts(status, **seen), PATIENCE).message == says


@pytest.mark.parametrize(
    ("since", "is_missing", "now", "asked_at", "after"),
    [
        (None, True, 500.0, 0.0, 500.0),
        (500.0, True, 600.0, 0.0, 500.0),
        (500.0, False, 600.0, 0.0, None),  # it is there, or its workspace is not
        (None, True, 500.0, 495.0, None),  # it was asked for just now
        (500.0, True, 4100.0, 0.0, 4100.0),  # nobody may have looked for an hour
    ],
)
def test_a_job_is_unknown_since_the_first_of_the_looks_that_did_not_find_it(
    since: float | None, is_missing: bool, now: float, asked_at: float, after: float | None
) -> None:
    assert note_look(since, is_missing, now, asked_at, PATIENCE) == after


@pytest.mark.parametrize(
    ("link", "path", "version"),
    [
        ("https://elsewhere.example:443/b?api-version=2&$skip=a%20b", "/b?api-version=2&$skip=a%20b", ""),
        ("https://management.azure.com/b?$skip=10", "/b?$skip=10", "1"),
        ("@elsewhere.example/b?api-version=2", "/@elsewhere.example/b?api-version=2", ""),
    ],
)
def test_pages_are_asked_for_at_one_address_whatever_their_links_say(
    link: str, path: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the SDK follows links: by GET, and with a version of the interface."""
    service, asked = Service(options()), list[Any]()
    links = iter([link, None])

    def read(what: str, path: str, version: str = "1", **how: str) -> dict[str, Any]:
        asked.append((path, version, how))
        return {"value": [len(asked)], "nextLink": next(links)}

    monkeypatch.setattr(service, "read", read)
    assert list(service.read_all("list", "/a", "1", method="POST", tag="t")) == [1, 2]
    assert asked == [("/a", "1", {"method": "POST", "tag": "t"}), (path, version, {})]


@pytest.mark.parametrize(
    ("cloud", "address"),
    [
        ("", "https://management.azure.com"),
        ("AzureCloud", "https://management.azure.com"),
        ("AzureUSGovernment", "https://management.usgovcloudapi.net"),
        ("AzureChinaCloud", "https://management.chinacloudapi.cn"),
    ],
)
def test_documents_are_read_in_the_cloud_in_which_the_sdk_changes_them(
    cloud: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("azure.ai.ml")
    from azure.ai.ml._azure_environments import _get_base_url_from_metadata

    monkeypatch.delenv("ARM_CLOUD_METADATA_URL", raising=False)
    monkeypatch.delenv("AZUREML_CURRENT_CLOUD", raising=False)
    if cloud:
        monkeypatch.setenv("AZUREML_CURRENT_CLOUD", cloud)
    assert Service(options()).address == address == _get_base_url_from_metadata()


def test_a_compute_is_judged_as_it_is_and_not_as_it_was_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list was asked for before the choices that come first, which may take minutes."""
    provisioner, deleted = Provisioner(Service(options()), AuditLog(tmp_path)), list[str]()
    choice = SkuChoice(sku="Standard_NC40ads_H100_v5", tier="spot")
    name = compute_name("dtrain", choice)
    sent = {"vmSize": choice.sku, "vmPriority": "LowPriority", "enableNodePublicIp": False}
    sent |= {"scaleSettings": {"maxNodeCount": 2, "nodeIdleTimeBeforeScaleDown": "PT10M"}}

    def shown(*errors: Any) -> Compute:
        properties = {"provisioningState": "Succeeded", "properties": sent | {"errors": errors}}
        return read_compute({"name": name, "tags": {CLUSTER_TAG: "dtrain"}, "properties": properties})

    never = {"error": {"code": "UnsupportedVMSizeForLowPriority", "message": "it never gets nodes"}}
    monkeypatch.setattr(provisioner, "settled", lambda *_: shown(never))
    monkeypatch.setattr(provisioner, "nodes", lambda name: [])
    monkeypatch.setattr(provisioner, "delete", deleted.append)
    found = provisioner._get(choice, shown(), 2, lambda *_: None)
    assert getattr(found, "code", found) == "UnsupportedVMSizeForLowPriority"
    assert deleted == [name]


class TestOrphans:
    def test_nobodys_jobs(self) -> None:
        def why(name: str, record: Any, settled: bool = False, owner: str | None = "run") -> str:
            return manager.why_orphaned(name, record, settled, owner, {"run"})

        assert not why("j-l2", RECORD)
        assert not why("j-l2", RECORD, owner=None)
        assert "gone" in why("j-l2", None)
        assert "place" in why("j-l1", RECORD)
        assert "ended" in why("j-l2", RECORD, settled=True)
        assert "other" in why("j-l2", RECORD, owner="other")
        assert "cancelled" in why("j-l2", {**RECORD, "cancel_asked_at": 1.0})

    def test_what_a_person_goes_on_with_is_no_orphan_whatever_its_tag_says(self, tmp_path: Path) -> None:
        jobs_uri = f"{tmp_path}/jobs"
        rundir = RunDir(f"{jobs_uri}/j")
        rundir.write_json(LAUNCH, RECORD)
        tags = {JOB_TAG: "j", LAUNCH_TAG: "2", RUN_DIR_TAG: rundir.uri, RUN_TAG: "ended"}
        job = ServiceJob(name="j-l2", status="Running", tags=tags, compute="c")
        assert getattr(manager.judge_job(job, jobs_uri, {"live"}), "dagster_run_id", None) == "ended"
        for copied in ({"name": "witty-owl"}, {"tags": tags | {RUN_DIR_TAG: "az://elsewhere/jobs/j"}}, {"tags": {}}):
            assert manager.judge_job(dataclasses.replace(job, **copied), jobs_uri, {"live"}) is None
        for owner, is_orphan in (("other", True), ("live", False), (None, False)):
            rundir.write_json(OWNER, {"dagster_run_id": owner})
            assert (manager.judge_job(job, jobs_uri, {"live"}) is not None) is is_orphan


class TestCode:
    def test_takes_the_trainer_and_what_the_model_imports_and_nothing_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = tmp_path / "own"
        (own / "nets" / "deep").mkdir(parents=True)
        (own / "nets" / "__init__.py").write_text("")
        (own / "nets" / "deep" / "__init__.py").write_text("from .parts import block\n")
        (own / "nets" / "deep" / "parts.py").write_text("from ..shared import width\nimport lonely_helper\n")
        (own / "nets" / "shared.py").write_text("import os, torch\nwidth = 3\n")
        (own / "nets" / "unused.py").write_text("")
        (own / "nets" / "weights.bin").write_text("not code")
        (own / "lonely_helper.py").write_text("")
        (own / "secrets.env").write_text("KEY=1")
        monkeypatch.syspath_prepend(str(own))
        monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "nets, numpy")
        files = stage_for_nodes(tmp_path / "staged", ["nets.deep:build", "tcn", "numpy.linalg:norm"])
        outside = [name for name in files if not name.startswith("trainer/")]
        assert outside == [
            "lonely_helper.py", "nets/__init__.py", "nets/deep/__init__.py", "nets/deep/parts.py", "nets/shared.py",
        ]  # fmt: skip
        assert "trainer/__main__.py" in files
        there = {path.relative_to(tmp_path / "staged").as_posix() for path in (tmp_path / "staged").rglob("*.*")}
        assert there == set(files)

    def test_says_which_module_is_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(StagingError, match="set DTRAIN_FACTORY_MODULES=no_such_module"):
            stage_for_nodes(tmp_path, ["no_such_module:build"])
        monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "no_such_module")
        with pytest.raises(StagingError, match="no_such_module"):
            stage_for_nodes(tmp_path, ["no_such_module:build"])


def test_interpreters_and_words_reach_the_nodes_shell() -> None:
    words = [sys.executable, "-m", "trainer", "--config", "az://c/jobs/j 1/job.json"]
    assert command_line(words) == "python -m trainer --config 'az://c/jobs/j 1/job.json'"
    assert command_line(["./train.sh"]) == "./train.sh"


def test_times_of_the_service() -> None:
    assert parse_time("2026-01-01 00:00:01") == parse_time("2026-01-01T00:00:01Z") == 1767225601.0
    assert parse_time(None) is None


def test_a_launch_has_one_name_whoever_asks() -> None:
    assert launch_record.job_name("train-ab_c-1", 2) == "train-ab_c-1-l2"
    alike = [launch_record.job_name(name, 1) for name in ("train-ab-c", "train-AB-c", "train-ab.c", "Train-ab-c")]
    assert len(set(alike)) == 4
    assert [name.lower() for name in alike] == alike, "as the service writes them"
    assert alike == [
        launch_record.job_name(name, 1) for name in ("train-ab-c", "train-AB-c", "train-ab.c", "Train-ab-c")
    ]


class TestAudit:
    def test_one_line_for_each_operation_with_its_result(self, tmp_path: Path) -> None:
        log = AuditLog(tmp_path, dagster_run_id="run", who="me")
        with log.operation("compute.put", "c", sku="S"):
            note_request_id("r0")
            with log.operation("compute.delete", "d"):
                assert noted_request_id() is None
            note_request_id("r1")
        assert noted_request_id() is None
        with pytest.raises(KeyError), log.operation("job.cancel", "j"):
            raise KeyError("gone")
        inner, first, second = log.lines()
        assert "request_id" not in inner
        assert (first["operation"], first["target"], first["result"]) == ("compute.put", "c", "done")
        assert (first["who"], first["dagster_run_id"], first["request_id"]) == ("me", "run", "r1")
        assert first["details"] == {"sku": "S"}
        assert (second["result"], second["code"]) == ("failed", "KeyError")
        (path,) = (tmp_path / "audit").iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.name == f"{time.strftime('%Y-%m', time.gmtime())}.jsonl"

    def test_writers_side_by_side_keep_lines_whole(self, tmp_path: Path) -> None:
        script = (
            "import sys; from pathlib import Path; from dtrain_dagster.support.audit import AuditLog\n"
            "for number in range(200):\n"
            "    with AuditLog(Path(sys.argv[1])).operation('put', 'x' * 3000, number=number): pass\n"
        )
        writers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(2)]
        assert [writer.wait(60) for writer in writers] == [0, 0]
        assert len(AuditLog(tmp_path).lines()) == 400

    def test_nothing_is_done_where_it_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "audit").write_text("a file")
        done = []
        with pytest.raises(AuditError, match="DTRAIN_HOME"), AuditLog(tmp_path).operation("put", "x"):
            done.append(1)
        assert not done

    def test_secrets_are_struck_out(self, tmp_path: Path) -> None:
        log, text = AuditLog(tmp_path), "https://a.blob/c/b?sv=1&sig=PLANTED&se=2"
        with pytest.raises(RuntimeError), log.operation("put", text, note=text, inner={"deep": [text]}):
            raise RuntimeError(text)
        written = next((tmp_path / "audit").iterdir()).read_text()
        assert "PLANTED" not in written
        assert json.loads(written)["result"] == "failed"

    def test_a_secret_at_the_end_of_a_long_message_is_struck_out_before_that_is_cut(self, tmp_path: Path) -> None:
        log = AuditLog(tmp_path)
        with pytest.raises(RuntimeError), log.operation("put", "x"):
            raise RuntimeError("x" * 1980 + "https://user:PLANTED@host/path")
        assert "PLA" not in log.lines()[0]["message"]


def test_a_job_takes_no_secrets_along() -> None:
    refuse_secrets({"DTRAIN_CACHE": "/mnt/cache", "OMP_NUM_THREADS": "4"})
    for name, value in (("AZURE_STORAGE_CONNECTION_STRING", "x"), ("URL", "https://a/b?sig=abcdefgh")):
        with pytest.raises(ClusterError, match="Key Vault"):
            refuse_secrets({name: value})


def test_what_needs_a_cluster_says_so_before_it_asks_anybody(tmp_path: Path) -> None:
    manager = AzureMLClusterManager(options(storage_uri=str(tmp_path)), tmp_path)
    for ask in (
        lambda: manager.scale_cluster(3),
        lambda: manager.submit_job(JobSpec(job_id="j", run_dir=f"{tmp_path}/jobs/j", command=("x",), node_count=1)),
    ):
        with pytest.raises(ClusterError, match="provision"):
            ask()
    with pytest.raises(ClusterError, match="keeps job"):
        manager.submit_job(JobSpec(job_id="j", run_dir="/elsewhere", command=("x",), node_count=1))
    assert manager.list_jobs() == []
