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

from dtrain_dagster.clusters.azure_ml import launch_record, orphans
from dtrain_dagster.clusters.azure_ml.jobs import (
    JOB_TAG,
    LAUNCH_TAG,
    RUN_DIR_TAG,
    RUN_TAG,
    command_line,
    parse_time,
)
from dtrain_dagster.clusters.azure_ml.manager import AzureMLClusterManager, busy, refuse_secrets
from dtrain_dagster.clusters.azure_ml.provision import describe_compute, read_compute
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
from dtrain_dagster.clusters.base import OWNER, ClusterError, JobSpec, JobState
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


class TestChain:
    def test_starts_with_the_wanted_size_and_goes_tier_by_tier(self) -> None:
        found = chain("B", ("A", "B"), ("dedicated", "low_priority"))
        assert [(choice.sku, choice.tier) for choice in found] == [
            ("B", "dedicated"), ("A", "dedicated"), ("B", "spot"), ("A", "spot"),
        ]  # fmt: skip

    def test_leaves_out_what_was_waited_for_in_vain(self) -> None:
        assert V100 not in chain(V100.sku, DEFAULT_CHAIN, ("dedicated",), {V100})

    def test_default_has_every_kind_of_equivalent(self) -> None:
        names = " ".join(DEFAULT_CHAIN)
        assert all(kind in names for kind in ("A100", "H100", "T4"))

    def test_default_holds_what_can_be_bought_for_training(self) -> None:
        for gpus, skus in DEFAULT_CHAINS.items():
            recorded = [read_sizes()[sku] for sku in skus]
            assert all("AmlCompute" in row.compute_types and row.gpus == gpus for row in recorded)
            assert all(hardware_of(sku).retired_on is None for sku in skus)
        assert DEFAULT_CHAIN[0] == BUYABLE_GPU_TYPE


class TestQuota:
    def quota(self, used: int, limit: int, name: str = "standardNCSv3Family", kind: str = "") -> list[Quota]:
        return [Quota(name=name, used=used, limit=limit, kind=kind)]

    @pytest.mark.parametrize(
        ("used", "limit", "there", "code"),
        [(0, 18, 0, None), (0, 17, 0, "QuotaTooSmall"), (1, 18, 0, "QuotaInUse"), (18, 18, 3, None), (0, -1, 0, None)],
    )
    def test_counts_cores_and_nodes_that_are_there_already(
        self, used: int, limit: int, there: int, code: str | None
    ) -> None:
        refusal = examine(V100, SIZES, self.quota(used, limit), 3, there, 1)
        assert (refusal.code if refusal else None) == code

    def test_names_of_families_are_compared_by_letters_and_digits(self) -> None:
        choice = SkuChoice(sku="Standard_NC64as_T4_v3", tier="dedicated")
        refusal = examine(choice, SIZES, self.quota(0, 0, "standardNCASv3_T4Family"), 1, 0, 1)
        assert refusal is not None
        assert refusal.code == "QuotaTooSmall"

    @pytest.mark.parametrize("total", ["TotalLowPriorityCores", "lowPriorityCores", "Total Regional Spot vCPUs"])
    def test_spot_has_one_quota_for_all_families_under_each_of_its_names(self, total: str) -> None:
        choice = dataclasses.replace(V100, tier="spot")
        quotas = [*self.quota(0, 0), *self.quota(0, 100, total)]
        assert examine(choice, SIZES, quotas, 3, 0, 1) is None
        assert examine(choice, SIZES, self.quota(90, 100, total), 3, 0, 1) is not None
        assert examine(V100, SIZES, self.quota(0, 0, total), 3, 0, 1) is None, "it does not count dedicated cores"

    @pytest.mark.parametrize("total", ["TotalDedicatedCores", "Total Cluster Dedicated Regional vCPUs"])
    def test_the_total_of_all_families_counts_too(self, total: str) -> None:
        quotas = [*self.quota(0, 100), *self.quota(0, 17, total)]
        assert examine(V100, SIZES, quotas, 3, 0, 1) is not None

    @pytest.mark.parametrize("reverse", [False, True])
    def test_what_is_too_small_for_ever_is_told_before_what_is_in_use_now(self, reverse: bool) -> None:
        in_use, too_small = self.quota(18, 18), self.quota(0, 17, "TotalDedicatedCores")
        quotas = [*too_small, *in_use] if reverse else [*in_use, *too_small]
        refusal = examine(V100, SIZES, quotas, 3, 0, 1)
        assert refusal is not None
        assert (refusal.code, refusal.retry_seconds) == ("QuotaTooSmall", NO_QUOTA_SECONDS)
        assert "TotalDedicatedCores" in refusal.message

    def test_a_family_that_is_listed_twice_counts_on_its_own_tier(self) -> None:
        """Recorded: one row of dedicated and one of Spot cores ("low-priority"), under the same name."""
        kinds = ("vmFamily/dedicatedCores/usages", "vmFamily/lowPriorityCores/usages")
        dedicated, low = (f"Microsoft.MachineLearningServices/{kind}" for kind in kinds)
        quotas = [*self.quota(0, 100, kind=dedicated), *self.quota(0, 6, kind=low)]
        assert examine(V100, SIZES, quotas, 3, 0, 1) is None
        assert examine(dataclasses.replace(V100, tier="low_priority"), SIZES, quotas, 3, 0, 1) is not None

    def test_a_usage_without_a_name_a_limit_or_a_value_is_survived(self) -> None:
        rows: list[Any] = [
            {"name": None, "limit": 5, "currentValue": 0},
            {"name": {"value": "standardNCSv3Family", "localizedValue": None}, "limit": None, "currentValue": 0},
            {"name": {"value": "standardNCSv3Family"}, "limit": 7, "currentValue": None},
        ]
        assert [Quota.read(row) for row in rows] == [None, None, *self.quota(0, 7)]

    def test_a_size_that_is_not_listed_or_does_not_fit_is_not_asked_for(self) -> None:
        endpoints_only = dataclasses.replace(SIZES["standard_nc6s_v3"], compute_types=("MIR",))
        codes = [
            examine(SkuChoice(sku="Standard_ND96", tier="dedicated"), SIZES, [], 1, 0, 1),
            examine(SkuChoice(sku="Standard_NC64as_T4_v3", tier="low_priority"), SIZES, [], 1, 0, 1),
            examine(V100, SIZES, [], 1, 0, 2),
            examine(V100, {**SIZES, "standard_nc6s_v3": endpoints_only}, [], 1, 0, 1),
        ]
        assert [refusal.code if refusal else "" for refusal in codes] == [
            "SkuNotListed", "NoLowPriority", "TooFewGpus", "NotForClusters",
        ]  # fmt: skip


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


class TestOptions:
    def test_making_a_manager_asks_nobody_and_imports_no_client(self, tmp_path: Path) -> None:
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


def decided(status: str, **fields: Any) -> tuple[str, JobState]:
    decision: JobDecision = decide_job(facts(status, **fields), PATIENCE)
    return decision.action, decision.state


class TestStates:
    done, failed, stopped = (
        {"status": word, "launch": 2, "error": "why"} for word in ("succeeded", "failed", "stopped")
    )

    @pytest.mark.parametrize("why", [{}, {"error": PREEMPTED}, {"vanished": (1,)}, {"stopping": "silent"}])
    def test_one_that_has_spent_its_budget_is_not_submitted_again(self, why: dict[str, Any]) -> None:
        spent = {"status": "budget", "launch": 2, "error": "stopped at its budget"}
        for status in ("Failed", "Canceled", "Completed"):
            found = decide_job(facts(status, result=spent, exit_codes=(77, 75), **why), PATIENCE)
            assert found == JobDecision("settle", JobState.FAILED, "stopped at its budget")
        before = {**spent, "launch": 1}
        assert decided("Failed", result=before, error=PREEMPTED) == ("next", JobState.QUEUED)

    @pytest.mark.parametrize("status", ["NotStarted", "Starting", "Provisioning", "Preparing", "Queued"])
    def test_what_waits_is_queued_until_its_deadline(self, status: str) -> None:
        assert decided(status) == ("report", JobState.QUEUED)
        assert decided(status, phase_since=899.0) == ("stop", JobState.QUEUED)
        waits = decide_job(facts(status, nodes_ready=2), PATIENCE).message
        assert waits == "has been waiting for nodes for 10 s, 2 of 3 nodes are there"
        assert decide_job(facts(status), PATIENCE).message == "has been waiting for nodes for 10 s"

    def test_where_nodes_cannot_be_had_and_others_can_it_waits_less(self) -> None:
        short = {"phase_since": 940.0, "allocation_error": "AllocationFailed"}
        assert decided("Queued", **short) == ("report", JobState.QUEUED)
        assert decided("Queued", has_alternative=True, **short) == ("stop", JobState.QUEUED)

    @pytest.mark.parametrize("status", ["Running", "Finalizing"])
    def test_what_works_is_running(self, status: str) -> None:
        assert decided(status, phase_since=0.0) == ("report", JobState.RUNNING)

    def test_a_job_that_is_not_heard_of_is_believed_by_its_nodes(self) -> None:
        assert decided("NotResponding") == ("report", JobState.RUNNING)
        heard = decide_job(facts("NotResponding", heard_at=996.0), PATIENCE).message
        assert heard == "the service says NotResponding; its nodes were last heard from 4 s ago"
        assert decided("NotResponding", phase_since=960.0) == ("stop", JobState.RUNNING)
        assert decided("NotResponding", phase_since=960.0, heard_at=995.0) == ("report", JobState.RUNNING)
        assert decided("AWordThatIsNew") == ("report", JobState.RUNNING)

    def test_a_paused_job_waits_no_longer_than_in_the_queue(self) -> None:
        assert decided("Paused") == ("report", JobState.QUEUED)
        assert decided("Paused", phase_since=800.0) == ("stop", JobState.QUEUED)
        assert decide_job(facts("Paused"), PATIENCE).message == "has been paused by the service for 10 s"
        cause = {"phase_since": 940.0, "allocation_error": "AllocationFailed", "has_alternative": True}
        assert decided("Paused", **cause) == ("report", JobState.QUEUED), "of nodes that it has"

    def test_the_end_is_what_the_training_says(self) -> None:
        assert decided("Completed", result=self.done) == ("settle", JobState.SUCCEEDED)
        assert decided("Failed", result=self.done, error=PREEMPTED) == ("settle", JobState.SUCCEEDED)
        assert decided("Completed", result=None) == ("settle", JobState.FAILED)
        assert decided("Completed", result={**self.done, "launch": 1}) == ("settle", JobState.FAILED)
        assert decided("Completed", elastic=False) == ("settle", JobState.SUCCEEDED)
        assert decided("Failed", result=self.failed, error=PREEMPTED) == ("settle", JobState.FAILED)

    @pytest.mark.parametrize(
        "how",
        [
            {"code": "PreemptionError", "error": "Nodes of this job got pre-empted"},
            {"error": "Execution failed. User process 'python' exited with status code 75."},
            {"error": "Process exited with code -9"},
            {"exit_codes": (137, 75)},
            {"vanished": (1,)},
            {"result": stopped},
        ],
    )
    def test_a_launch_that_lost_its_nodes_is_followed_by_another(self, how: dict[str, Any]) -> None:
        assert decided("Failed", **how) == ("next", JobState.QUEUED)
        assert decided("Failed", **how, resubmissions_left=0) == ("settle", JobState.FAILED)
        assert decided("Failed", **how, elastic=False) == ("settle", JobState.FAILED)
        assert decided("Failed", **how, cancel_asked_at=1.0) == ("settle", JobState.CANCELLED)

    @pytest.mark.parametrize(
        "how", [{"error": "exited with code 1"}, {"exit_codes": (2, 75)}, {"error": "no such image"}]
    )
    def test_a_launch_that_failed_by_itself_is_not(self, how: dict[str, Any]) -> None:
        found = decide_job(facts("Failed", **how), PATIENCE)
        assert (found.action, found.state) == ("settle", JobState.FAILED)
        assert found.message.startswith(how.get("error", "")), "in the service's words"

    def test_a_failure_of_its_own_counts_more_than_nodes_that_vanished_with_it(self) -> None:
        assert decided("Failed", exit_codes=(1,), vanished=(0, 2)) == ("settle", JobState.FAILED)

    def test_what_was_cancelled_from_here_or_from_elsewhere(self) -> None:
        assert decided("Canceled", cancel_asked_at=1.0) == ("settle", JobState.CANCELLED)
        assert decided("Canceled") == ("settle", JobState.CANCELLED)
        assert decided("Canceled", code="PreemptionError") == ("next", JobState.QUEUED)
        assert decided("Canceled", stopping="queued too long") == ("next", JobState.QUEUED)

    def test_a_wish_to_cancel_is_repeated_until_the_service_has_heard_it(self) -> None:
        for status in ("Queued", "Running", "NotResponding", "Paused"):
            assert decided(status, cancel_asked_at=1.0)[0] == "cancel"
        assert decided("CancelRequested", cancel_asked_at=1.0)[0] == "report"

    def test_a_launch_that_is_being_ended_is_not_followed_before_it_has_ended(self) -> None:
        assert decided("Running", stopping="silent")[0] == "stop"
        assert decided("CancelRequested", stopping="silent")[0] == "report"

    def test_a_job_that_is_not_there(self) -> None:
        assert decided("", confirmed=False, submitted_at=995.0) == ("report", JobState.QUEUED)
        assert decided("", confirmed=False) == ("submit", JobState.QUEUED)
        unseen: dict[str, Any] = {"confirmed": False, "cancel_asked_at": 1.0}
        assert decided("", **unseen)[0] == "make_sure"
        assert decided("", **unseen, cancel_answer=CANCEL_NOT_FOUND) == ("settle", JobState.CANCELLED)

    def test_a_job_that_is_not_there_any_more_is_looked_at_again_and_cancelled_before_it_is_given_up(self) -> None:
        assert decided("")[0] == decided("", missing_since=820.5)[0] == "wait"
        assert decided("", cancel_asked_at=1.0)[0] == "cancel"
        gone: dict[str, Any] = {"missing_since": 800.0}
        for more in ({}, {"cancel_asked_at": 1.0}, {"stopping": "silent"}, {"result": self.done}, {"elastic": False}):
            assert decided("", **gone, **more)[0] == "make_sure"
        gone["cancel_answer"] = CANCEL_NOT_FOUND
        assert decided("", **gone) == ("settle", JobState.FAILED)
        assert decided("", **gone, cancel_asked_at=1.0) == ("settle", JobState.CANCELLED)
        assert decided("", **gone, result=self.done) == ("settle", JobState.SUCCEEDED)
        for why in (self.failed, {"status": "budget", "launch": 2, "error": "why"}):
            found = decide_job(facts("", **gone, result=why), PATIENCE)
            assert found == JobDecision("settle", JobState.FAILED, "why")
        assert decided("", **gone, stopping="queued too long") == ("next", JobState.QUEUED)
        refused = decide_job(facts("", missing_since=800.0, cancel_answer="refused: no role"), PATIENCE)
        assert refused.state is JobState.FAILED
        assert "refused: no role" in refused.message
        assert "has not known it for 200 s;" in refused.message

    def test_a_job_whose_cancellation_was_taken_is_waited_for_and_gone_on_with(self) -> None:
        taken = {"stopping": WAS_THERE}
        assert decided("", **taken)[0] == "wait"
        assert decided("CancelRequested", **taken)[0] == "report"
        assert decided("Canceled", **taken) == ("next", JobState.QUEUED)
        assert decided("Failed", **taken, exit_codes=(1,)) == ("settle", JobState.FAILED), "it had failed before that"
        assert decided("Failed", **taken, exit_codes=(137,)) == ("next", JobState.QUEUED)

    def test_a_job_is_unknown_since_the_first_of_the_looks_that_did_not_find_it(self) -> None:
        assert note_look(None, True, 500.0, 0.0, PATIENCE) == 500.0
        assert note_look(500.0, True, 600.0, 0.0, PATIENCE) == 500.0
        assert note_look(500.0, False, 600.0, 0.0, PATIENCE) is None, "it is there, or its workspace is not"
        assert note_look(None, True, 500.0, 495.0, PATIENCE) is None, "it was asked for just now"
        assert note_look(500.0, True, 4100.0, 0.0, PATIENCE) == 4100.0, "nobody may have looked for an hour"


class TestOrphans:
    def test_nobodys_jobs(self) -> None:
        def why(name: str, record: Any, settled: bool = False, owner: str | None = "run") -> str:
            return orphans.why_orphaned(name, record, settled, owner, {"run"})

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
        assert getattr(orphans.judge_job(job, jobs_uri, {"live"}), "dagster_run_id", None) == "ended"
        for owner, is_orphan in (("other", True), ("live", False), (None, False)):
            rundir.write_json(OWNER, {"dagster_run_id": owner})
            assert (orphans.judge_job(job, jobs_uri, {"live"}) is not None) is is_orphan


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
