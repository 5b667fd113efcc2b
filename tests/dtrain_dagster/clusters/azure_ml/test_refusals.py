"""What a refusal of a compute means, from bodies as Azure has sent them; each names where it was seen."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dtrain_dagster.clusters.azure_ml.refusals import (
    LONGEST_MESSAGE,
    classify_refusal,
    error_body_of,
    error_parts,
    read_cluster_trouble,
    read_late_refusal,
)
from dtrain_dagster.clusters.azure_ml.sku_chain import (
    IN_USE_SECONDS,
    NO_QUOTA_SECONDS,
    SCARCE_SECONDS,
    SkuRefusal,
    retry_at,
)

FAMILY_QUOTA = (
    "The specified subscription has a Standard NCADSA100v4 family vCPU quota of 0 and cannot accomodate for at least 1 "
    "requested managed compute nodes which maps to 24 vCPUs. Talk to your Subscription Admin or refer to "
    "https://docs.microsoft.com/azure/machine-learning/how-to-manage-quotas#request-quota-increases"
)
SIZES = ",".join(f"STANDARD_D{number}_V2" for number in range(1, 60))

REAL: list[tuple[str, Any, int, str, str, float]] = [
    (  # ansible-collections/azure, pull request 2209: a minimum of 0 nodes was asked for, and one is still too many
        "family quota below one node",
        {"error": {"code": "ClusterMinNodesExceedCoreQuota", "message": FAMILY_QUOTA}},
        200, "next", "ClusterMinNodesExceedCoreQuota", NO_QUOTA_SECONDS,
    ),
    (  # Azure/mlops-v2, issue 81: waiting for creation of Compute Cluster
        "total quota as a plain BadRequest",
        {"status": "Failed", "error": {"code": "BadRequest", "message": (
            "The specified subscription has a total vCPU quota of 0 and cannot accomodate for at least 1 requested "
            "managed compute node which maps to 2 vCPUs.")}},
        200, "next", "BadRequest", NO_QUOTA_SECONDS,
    ),
    (  # microsoft/az-deep-batch-score, issue 4: provisioning errors of a Failed compute
        "a size that computes cannot have, listed in the text of details",
        [{"code": "BadRequest", "message": "The request is invalid", "error": {
            "code": "BadRequest", "statusCode": 400, "message": "The request is invalid", "details": [{
                "code": "The request is invalid",
                "message": "RequestId: \nError code: 'InvalidPropertyValue'. Target: ''. Message: 'The specified value "
                "Standard_D2s_v3 for property Cluster.Properties.VMSize is not a supported VM size. See additional "
                f"details for supported VM sizes.'\n    Error code: 'SupportedVMSizes'. Target: ''. Message: '{SIZES}'",
            }]}}],
        400, "next", "InvalidPropertyValue", NO_QUOTA_SECONDS,
    ),
    (  # `errors` of a compute that is Succeeded: AmlCompute and H100 on the low-priority tier (August 2026)
        "no low priority for this size",
        [{"error": {"code": "UnsupportedVMSizeForLowPriority", "message": (
            "The VM size STANDARD_ND96ISR_H100_v5 is not allowed for LowPriority. Please convert to Dedicated or use a "
            "different VM size.")}}],
        200, "next", "UnsupportedVMSizeForLowPriority", NO_QUOTA_SECONDS,
    ),
    (  # the same sentence, where only that is passed on
        "no low priority, in words",
        {"error": {"code": "BadRequest", "message": "The VM size STANDARD_NC80ADIS_H100_V5 is not allowed for "
         "LowPriority."}},
        400, "next", "BadRequest", NO_QUOTA_SECONDS,
    ),
    (  # a report of August 2026: two refusals of one request, of which only the other was ARM's AuthorizationFailed
        "forbidden, in additionalInfo",
        {"error": {"code": "UserError", "message": "Identity does not have permissions for computes/write actions.",
                   "details": [], "additionalInfo": [
                       {"type": "ComponentName", "info": {"value": "managementfrontend"}},
                       {"type": "InnerError", "info": {"value": {"code": "ForbiddenError", "innerError": None}}}]}},
        403, "fatal", "ForbiddenError", SCARCE_SECONDS,
    ),
    (  # the same shape around a refusal of a size
        "quota, in additionalInfo",
        {"error": {"code": "UserError", "message": "The request is invalid.", "details": [], "additionalInfo": [
            {"type": "ComponentName", "info": {"value": "managementfrontend"}},
            {"type": "InnerError", "info": {"value": {"code": "BadRequest", "innerError": {
                "code": "ClusterMinNodesExceedCoreQuota", "innerError": None}}}}]}},
        400, "next", "ClusterMinNodesExceedCoreQuota", NO_QUOTA_SECONDS,
    ),
    (  # theonemule/fahclient-azure-vm, issue 3
        "quota, in details of a template",
        {"code": "InvalidTemplateDeployment", "message": "The template deployment 'Microsoft.Template' is not valid "
         "according to the validation procedure. The tracking id is '9be7'. See inner errors for details.",
         "details": [{"code": "QuotaExceeded", "message": "Operation could not be completed as it results in exceeding "
                      "approved Total Regional Cores quota."}]},
        400, "next", "QuotaExceeded", NO_QUOTA_SECONDS,
    ),
    (  # microsoft/openshift-origin, issue 42: the detail's message is JSON itself
        "quota, in JSON in the text of details",
        {"code": "DeploymentFailed", "message": "At least one resource deployment operation failed.", "details": [{
            "code": "Conflict", "message": '{\r\n  "error": {\r\n    "code": "OperationNotAllowed",\r\n    "message": '
            '"Operation results in exceeding quota limits of Core. Maximum allowed: 10, Current in use: 10."\r\n  }\r\n'
            "}",
        }]},
        409, "next", "OperationNotAllowed", NO_QUOTA_SECONDS,
    ),
    (  # Azure/azure-cli, issue 32628
        "capacity of a region",
        {"error": {"code": "SkuNotAvailable", "message": "The requested VM size for resource 'Following SKUs have "
         "failed for Capacity Restrictions: Standard_D4ads_v5' is currently not available in location 'eastus'."}},
        409, "next", "SkuNotAvailable", SCARCE_SECONDS,
    ),
    (  # MicrosoftLearning/mslearn-dp100, issue 35: the code is among the words
        "nodes of a job above the quota",
        {"error": {"code": "UserError", "message": "Job submission to AzureML Compute encountered an Exception with "
         "status code JobNodeCountExceedsCoreQuota, The specified subscription has a Standard DSv2 family vCPU quota "
         "of 2 and is less than the requested job node count of 2 which maps to 4 vCPUs."}},
        400, "next", "JobNodeCountExceedsCoreQuota", NO_QUOTA_SECONDS,
    ),
    (  # MicrosoftDocs/azure-docs, issue 121466: no code at all
        "quota before a colon",
        {"error": {"code": None, "message": "OutOfQuota: Not enough cluster CPU quota. The amount of additional CPU "
         "quota requested is 8, and you are currently using 14. Your amount of maximum quota is 20."}},
        400, "next", "OutOfQuota", NO_QUOTA_SECONDS,
    ),
    (  # Azure/MachineLearningNotebooks, issue 613: the region has all its clusters, so another size does not help
        "too many clusters",
        {"code": "OK", "statusCode": 200, "message": 'failed with status "Failed". Additional Info:"Operation results '
         'in exceeding quota limits of Microsoft.Batchlusters"'},
        200, "fatal", "OK", SCARCE_SECONDS,
    ),
    (  # trial and student subscriptions, whose offer leaves out whole families (2026); a request to raise it, too
        "a size that the offer leaves out",
        {"error": {"code": "ResourceNotAvailableForOffer", "message": "The resource is not available for the offer of "
         "this subscription."}},
        400, "next", "ResourceNotAvailableForOffer", NO_QUOTA_SECONDS,
    ),
    (  # another operation on the same compute is under way: not a mistake in the request, though its status says so
        "another operation is under way",
        {"error": {"code": "ConcurrentOperationsNotAllowed", "message": "Another operation on this cluster is in "
         "progress."}},
        400, "wait", "ConcurrentOperationsNotAllowed", 60.0,
    ),
    (  # the sentence of virtual machines about Spot (Azure/karpenter-provider-azure), in a plain BadRequest
        "quota of Spot, by its old name",
        {"error": {"code": "BadRequest", "message": "Operation could not be completed as it results in exceeding "
         "approved LowPriorityCores quota. Additional details - Current Limit: 3, Additional Required: 6"}},
        400, "next", "BadRequest", NO_QUOTA_SECONDS,
    ),
    (
        "quota of Spot, by its name in the portal",
        {"error": {"code": "BadRequest", "message": "Operation could not be completed as it results in exceeding "
         "approved Total Regional Spot vCPUs quota."}},
        400, "next", "BadRequest", NO_QUOTA_SECONDS,
    ),
    (
        "quota of Spot, as Azure ML calls it",
        {"error": {"code": "BadRequest", "message": "There are not enough low-priority cores for this request."}},
        400, "next", "BadRequest", NO_QUOTA_SECONDS,
    ),
    (  # Azure/MachineLearningNotebooks, issue 590
        "nothing but that it failed",
        {"error": {"code": "InternalServerError", "message": "An internal server error occurred. Please try again. If "
         "the problem persists, contact support"}},
        500, "wait", "InternalServerError", 60.0,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "status", "verdict", "code", "again"), [case[1:] for case in REAL], ids=[case[0] for case in REAL]
)
def test_a_refusal_is_read_where_its_truth_lies(body: Any, status: int, verdict: str, code: str, again: float) -> None:
    found = classify_refusal(body, status)
    assert (found.verdict, found.code, found.retry_seconds) == (verdict, code, again)
    assert found.message
    assert len(found.message) <= LONGEST_MESSAGE
    assert "STANDARD_D1_V2" not in found.message, "that list is older than the sizes that can be had"


@pytest.mark.parametrize(
    "sentence",
    [
        "The request is invalid.", "Bad Request", "", "An error occurred while processing your request.",
        "The template is not valid. See inner errors for details.", "One or more errors occurred. (…)",
        "Operation returned an invalid status code 'BadRequest'",
    ],
)  # fmt: skip
@pytest.mark.parametrize("code", ["BadRequest", "UserError", "", "HTTP 400"])
def test_a_general_sentence_never_ends_the_chain(code: str, sentence: str) -> None:
    assert classify_refusal({"error": {"code": code, "message": sentence}}, 400).verdict == "next"


@pytest.mark.parametrize("nesting", ["details", "innererror", "innerError", "additionalInfo", "text", "errors"])
@pytest.mark.parametrize(
    ("code", "verdict"), [("AllocationFailed", "next"), ("AuthorizationFailed", "fatal"), ("SomethingNew", "fatal")]
)
def test_it_does_not_matter_in_what_it_is_wrapped(nesting: str, code: str, verdict: str) -> None:
    inner = {"code": code, "message": "Why it is."}
    wrapped: Any = {
        "details": [inner], "innererror": inner, "innerError": {"code": "BadRequest", "innerError": inner},
        "additionalInfo": [{"type": "InnerError", "info": {"value": inner}}], "errors": [{"error": inner}],
        "text": json.dumps({"error": inner}),
    }[nesting]  # fmt: skip
    general = {"code": "BadRequest", "message": "The request is invalid."}
    body = {"error": {**general, "message": wrapped} if nesting == "text" else {**general, nesting: wrapped}}
    found = classify_refusal(body, 400)
    assert (found.code, found.message, found.verdict) == (code, "Why it is.", verdict)


def test_the_deeper_of_two_known_codes_counts() -> None:
    inner = {"code": "AuthorizationFailed", "message": "No role."}
    found = classify_refusal({"error": {"code": "OperationNotAllowed", "message": "Failed.", "details": [inner]}}, 409)
    assert (found.code, found.verdict) == ("AuthorizationFailed", "fatal")


def said(code: str, message: str) -> dict[str, str]:
    return {"code": code, "message": message}


@pytest.mark.parametrize(
    ("code", "message", "status", "verdict"),
    [
        ("ClusterCoreQuotaReached", "", 200, "next"),
        ("BadRequest", "The specified vmSize X is not supported in eastus.", 400, "next"),
        ("BadRequest", "minNodeCount must not be above maxNodeCount.", 400, "fatal"),
        ("AuthorizationFailed", "", 403, "fatal"),
        ("", "", 403, "fatal"),
        ("SubnetNotFound", "", 400, "fatal"),
        ("SubnetNotFound", "", 200, "fatal"),
        ("TooManyRequests", "", 429, "wait"),
        ("TooManyRequests", "The request exceeds the quota of requests.", 429, "wait"),
        ("Conflict", "Compute x is Creating", 409, "wait"),
        ("InternalServerError", "There is not enough capacity in this region.", 500, "next"),
        ("SomethingNew", "", 409, "next"),
        ("SomethingNew", "", 200, "next"),
        ("SomethingNew", "", 400, "fatal"),
    ],
)
def test_refusals_are_told_apart(code: str, message: str, status: int, verdict: str) -> None:
    assert classify_refusal(said(code, message), status).verdict == verdict


def test_asking_again_is_sensible_when_the_first_reason_passes() -> None:
    slow, soon = (classify_refusal(said(code, ""), 400) for code in ("QuotaExceeded", "ClusterCoreQuotaReached"))
    assert soon.retry_seconds == IN_USE_SECONDS
    assert retry_at([slow, soon], 1000.0) == 1000.0 + soon.retry_seconds < 1000.0 + slow.retry_seconds
    assert retry_at([SkuRefusal(code="", message="", verdict="next", retry_seconds=5)], 0.0) == 5


@pytest.mark.parametrize(
    ("message", "trouble"),
    [
        ("cluster has encountered unknown issue", "refused"),
        ("UserError: AzureMLCompute job failed. Cluster has encountered an unknown issue.", "refused"),
        ("cluster is in failed state", "lost"),
        ("The compute target dtrain-nc24adsa100v4 does not exist.", "lost"),
        ("Execution failed: FileNotFoundError: shard-7.parquet does not exist", ""),
        ("The compute is fine.\nBut my file does not exist", ""),
        ("", ""),
    ],
)
def test_what_a_job_says_of_its_compute_is_told_apart(message: str, trouble: str) -> None:
    assert read_cluster_trouble(message) == trouble


@pytest.mark.parametrize(
    ("code", "of_a_new_one", "of_another"),
    [
        ("UnsupportedVMSizeForLowPriority", True, True), ("ClusterMinNodesExceedCoreQuota", True, False),
        ("SubnetNotFound", True, False), ("OutOfCapacity", False, False), ("ClusterCoreQuotaReached", False, False),
        ("SomethingNew", False, False), ("InternalServerError", False, False),
    ],
)  # fmt: skip
def test_errors_of_a_compute_that_was_made_count_where_they_last(
    code: str, of_a_new_one: bool, of_another: bool
) -> None:
    errors = [{"error": {"code": code, "message": "Why."}}]
    assert (read_late_refusal(errors, True) is not None) == of_a_new_one
    assert (read_late_refusal(errors, False) is not None) == of_another
    assert read_late_refusal([], True) is None


def test_a_tree_without_an_end_and_things_that_are_no_error_are_survived() -> None:
    endless: dict[str, Any] = {"code": "BadRequest"}
    endless["innererror"] = endless
    assert len(error_parts(endless)) < 100
    for odd in (None, 5, b"x", "no { json", {"code": 7}, [[]], {"details": None, "message": None}, {"info": "x"}):
        assert classify_refusal(odd, 400).verdict in ("next", "fatal")


def test_the_body_is_found_in_the_cause_of_an_error() -> None:
    class Answer:
        def text(self) -> str:
            return '{"error": {"code": "BadRequest", "details": [{"code": "AllocationFailed"}]}}'

    cause = RuntimeError("refused")
    cause.response = Answer()  # type: ignore[attr-defined]
    error = ValueError("of ours")
    error.__cause__ = cause
    assert classify_refusal(error_body_of(error), 400).code == "AllocationFailed"
    assert error_body_of(ValueError("no answer")) is None
