"""Why a launch failed: exit codes first, then the service's own words, and the words of the user's output never."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from dtrain_dagster.clusters.azure_ml.refusals import explain_loss, read_service_words
from dtrain_dagster.clusters.azure_ml.states import JobDecision, JobFacts, ServiceJob, decide_job
from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.settings.azure import AzureMLOptions

EXITED = (
    "Execution failed. User process 'python' exited with status code {code}. Please check log file "
    "'user_logs/std_log_process_00.txt' for error details. Error: {text}"
)
TRACEBACK = "Traceback (most recent call last): File \"train.py\", line 3, in <module> raise RuntimeError('{words}')"
PREEMPTED = (
    "AzureMLCompute job failed. PreemptionError: Nodes of this job got pre-empted. Check if the run has failed or "
    "restarted. Reason: Received pre-emption warning signal."
)
WORDS = (
    "cannot evict the cache", "the broker is unreachable", "no preemption point", "NodeLost", "heartbeat missed",
    "Nodes of this job got pre-empted", "cluster is in failed state", "exited with status code 137", "hardware failure",
    "low-priority queue is full", "PreemptionError: x", "The compute target x does not exist",
)  # fmt: skip


def explain(**seen: Any) -> str:
    nothing = {"exit_codes": (), "error_code": "", "error_message": "", "vanished": (), "was_stopped": False}
    return explain_loss(**{**nothing, **seen})


@pytest.mark.parametrize("words", WORDS)
def test_words_of_a_users_output_decide_nothing(words: str) -> None:
    text = TRACEBACK.format(words=words)
    for message in (
        EXITED.format(code=1, text=text),
        EXITED.format(code=1, text=words),
        f"User program failed with RuntimeError: {words}",
        f"Process 'worker 0' exited with code 1 and error message '{words}'.",
        f"AzureMLCompute job failed.\nExecutionFailed: {text}",
    ):
        assert explain(error_code="UserError", error_message=message) == "", message


@pytest.mark.parametrize("words", WORDS)
def test_a_job_that_fails_with_such_words_is_not_submitted_again(words: str) -> None:
    job = ServiceJob(status="Failed", error_code="ExecutionFailed", error_message=EXITED.format(code=1, text=words))
    record = {"launch": 1, "elastic": True, "cancel_asked_at": None, "stopping": "", "nodes_ready": None}
    facts = JobFacts(record=record, job=job, now=1000.0, phase_since=990.0, resubmissions_left=3, exit_codes=(1,))
    options = AzureMLOptions(
        subscription_id=f"{UUID(int=1)}", resource_group="g", workspace="w", storage_uri="az://d", image=""
    )
    decision: JobDecision = decide_job(facts, options)
    assert (decision.action, decision.state) == ("settle", JobState.FAILED)
    assert words in decision.message, "people read all of it"


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"exit_codes": (1,), "error_message": PREEMPTED}, ""),
        ({"exit_codes": (137, 75), "error_message": EXITED.format(code=1, text="")}, ""),
        ({"exit_codes": (137,)}, "137"),
        ({"exit_codes": (0, 0), "error_message": PREEMPTED}, "got pre-empted"),
        ({"error_message": EXITED.format(code=137, text=TRACEBACK)}, "137"),
        ({"error_message": EXITED.format(code=1, text="x"), "vanished": (1,), "was_stopped": True}, ""),
        ({"error_code": "PreemptionError"}, "PreemptionError"),
        ({"error_code": "UserError", "error_message": PREEMPTED}, "got pre-empted"),
        ({"error_message": f"UserError: {PREEMPTED}"}, "got pre-empted"),
        ({"error_message": PREEMPTED.replace(". Pre", ".\nPre")}, "got pre-empted"),
        ({"error_message": "AzureMLCompute job failed. Node tvmps_1 became unreachable."}, "unreachable"),
        ({"error_message": "NodeLost: The job lost its node."}, "lost its node"),
        ({"error_message": "AzureMLCompute cluster deal-uat does not exist"}, "does not exist"),
        ({"error_message": "cluster is in failed state"}, "failed state"),
        ({"error_message": "no such image", "vanished": (1, 2)}, "1, 2 disappeared without a record"),
        ({"was_stopped": True}, "SIGTERM"),
        ({"error_code": "JobTimeout", "error_message": "The job ran longer than its limit."}, ""),
        ({}, ""),
    ],
    ids=str,
)
def test_the_first_witness_that_can_tell_decides(seen: dict[str, Any], words: str) -> None:
    """A launch that failed by itself, or of which no witness can tell, has no words."""
    found = explain(**seen)
    assert words in found
    assert bool(found) is bool(words)


def test_the_services_words_end_where_the_users_begin() -> None:
    said = EXITED.format(code=42, text=TRACEBACK)
    assert read_service_words(said).endswith("for error details.")
    assert read_service_words(PREEMPTED) == PREEMPTED
    assert read_service_words("") == ""
