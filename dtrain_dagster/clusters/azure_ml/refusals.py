"""The meaning of what the service says: a refusal of a compute, a 404, why a job failed. Pure.

The service wraps the truth in general words: under ``BadRequest: The request is invalid`` lie other errors, in
``details``, ``innererror``, ``additionalInfo[].info``, in a message that is JSON, or that lists ``Error code: …``. So
the whole tree is read, and the most specific code in it counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dtrain_dagster.clusters.azure_ml.sku_chain import (
    IN_USE_SECONDS,
    NO_QUOTA_SECONDS,
    SCARCE_SECONDS,
    SkuRefusal,
    fold_name,
)
from dtrain_dagster.clusters.exit_policy import describe_exit, is_failure, is_loss

DEEPEST = 20
"""Levels of an error that are read; the service nests a handful."""
LONGEST_MESSAGE = 400
"""Characters of a message that are kept: some list every size of the service."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorPart:
    """One error in the tree. ``depth``: 0 outermost."""

    code: str
    message: str
    depth: int
    target: str = ""


_NEXT = {
    "clustercorequotareached": IN_USE_SECONDS,
    **dict.fromkeys(
        (
            *("skunotavailable", "vmsizenotavailable", "allocationfailed", "zonalallocationfailed"),
            *("overconstrainedallocationrequest", "outofcapacity", "insufficientcapacity", "clusteroutofcapacity"),
            "operationtimedout",
        ),
        SCARCE_SECONDS,
    ),
    # resourcenotavailableforoffer: the subscription's offer lacks this size; operationnotallowed: what Compute says
    # when cores do not suffice; requestdisallowedbypolicy: often a policy on sizes
    **dict.fromkeys(
        (
            *("vmsizenotsupported", "unsupportedvmsize", "unsupportedvmsizeforlowpriority"),
            *("notavailableforsubscription", "resourcenotavailableforoffer", "skuretired", "outofquota"),
            *("quotaexceeded", "corequotaexceeded", "clusterminnodesexceedcorequota", "jobnodecountexceedscorequota"),
            *("operationnotallowed", "lowprioritynotsupported", "requestdisallowedbypolicy"),
        ),
        NO_QUOTA_SECONDS,
    ),
}
"""Code, folded → seconds until a new request makes sense."""
_NEVER = {
    *("unsupportedvmsizeforlowpriority", "lowprioritynotsupported", "unsupportedvmsize", "vmsizenotsupported"),
    "skuretired",
}
"""Codes, folded, of computes that never get a node."""
_FATAL = {
    *("authorizationfailed", "linkedauthorizationfailed", "forbidden", "forbiddenerror", "invalidauthenticationtoken"),
    *("expiredauthenticationtoken", "missingsubscriptionregistration", "subscriptionnotregistered"),
    *("subscriptionnotfound", "disabledsubscription", "readonlydisabledsubscription", "resourcegroupnotfound"),
    *("workspacenotfound", "parentresourcenotfound", "scopelocked", "subnetnotfound", "invalidsubnet"),
    "failedidentityoperation",
}
"""Codes, folded, that no other size changes."""
_WAIT = {
    *("toomanyrequests", "conflict", "concurrentoperationsnotallowed", "operationpreempted", "serverbusy"),
    *("serviceunavailable", "internalservererror", "gatewaytimeout", "badgateway", "timeout", "requesttimeout"),
}
_GENERAL = {
    "",
    *("badrequest", "usererror", "badargument", "invalidargument", "invalidrequest", "validationerror", "systemerror"),
    *("serviceerror", "error", "ok", "none", "failed", "unknown", "unknownerror", "http400", "operationfailed"),
    *("resourceoperationfailure", "resourcedeploymentfailure", "deploymentfailed", "invalidtemplatedeployment"),
}
"""Codes, folded, that say that something is wrong, and not what."""
_GENERAL_SENTENCE = re.compile(
    r"(?is)\W*(the )?(request is invalid|bad request|(an? )?(unknown |unexpected |internal )?error (has )?occurred.*|"
    r"one or more errors occurred.*|operation returned an invalid status.*|operation (has )?failed.*|"
    r".*see (the )?(inner|additional) (errors?|details?).*)?\W*"
)
_SCARCE_WORDS = re.compile(
    r"(?i)(\b(v?cpu quota|core quota|quota (of|is) 0|exceed\w* (the )?\w* ?quota|not enough [\w ]*quota|"
    r"(exceed\w*|not enough|insufficient|no)( the)?( approved| free)? "
    r"(low-?priority ?cores|(total )?(regional )?spot v?cpus?)|"
    r"cannot accomm?odate|not (currently )?available in|not supported in|is not offered|no capacity|"
    r"not enough capacity|insufficient capacity|out of capacity|has been retired|is retired)|"
    r"not a supported VM ?size|VM ?size\b.{0,80}\bnot (supported|allowed|available))"
)
_LASTING_WORDS = re.compile(r"(?i)quota|cores|vcpu|supported|allowed|offered|retired")
_CLUSTER_COUNT = re.compile(r"(?i)quota limits? of Microsoft\.Batch\w*")
"""The number of clusters in a region: another size is one more of them."""
_LISTED = re.compile(r"Error code: '([^']+)'\. Target: '[^']*'\. Message: '(.*?)'(?=\s*(?:Error code:|$))", re.DOTALL)
_NAMED = re.compile(r"\b[A-Z][a-z]+(?:[A-Z][A-Za-z]+)+\b")


def classify_refusal(error: Any, status: int | None) -> SkuRefusal:
    """Return the meaning of a refusal. ``error``: the body of the answer, or several errors of one refusal;
    ``status``: of HTTP.

    The deepest known code counts; then the words, because quotas are refused as a plain ``BadRequest`` too; then the
    status: what is forbidden or malformed will be so for every size, but a conflict, a failed creation, or a sentence
    that says nothing may not.
    """
    parts = sorted(error_parts(error), key=lambda part: -part.depth)
    if any(_CLUSTER_COUNT.search(part.message) for part in parts):
        return _refusal(parts, next(part for part in parts if _CLUSTER_COUNT.search(part.message)), "fatal")
    for part in parts:
        known = fold_name(part.code)
        if known in _NEXT:
            return _refusal(parts, part, "next", _NEXT[known])
        if known in _FATAL:
            return _refusal(parts, part, "fatal")
    speaking = min(parts, key=_says_little, default=ErrorPart(code="", message="", depth=0))
    if status in (408, 429):
        return _refusal(parts, speaking, "wait", 60.0)
    for part in parts:
        if found := _SCARCE_WORDS.search(part.message):
            lasts = _LASTING_WORDS.search(found[0]) is not None
            return _refusal(parts, part, "next", NO_QUOTA_SECONDS if lasts else SCARCE_SECONDS)
    if (status is not None and status >= 500) or any(fold_name(part.code) in _WAIT for part in parts):
        return _refusal(parts, speaking, "wait", 60.0)
    if _says_little(speaking) < 2 and status is not None and 400 <= status < 500 and status != 409:
        return _refusal(parts, speaking, "fatal")
    if status in (401, 403):
        return _refusal(parts, speaking, "fatal")
    return _refusal(parts, speaking, "next")


def read_late_refusal(errors: Sequence[Any], is_new: bool) -> SkuRefusal | None:
    """Return the refusal in the errors of a compute that was made nevertheless; None where it may get nodes. Pure.

    Of one that ``is_new`` whatever only a person changes counts; of another, which had nodes perhaps, only what never
    changes. What may pass (no capacity now, cores in use) is left to the queue.
    """
    if not errors:
        return None
    refusal = classify_refusal(errors, 200)
    lasts = refusal.verdict == "fatal" or refusal.retry_seconds >= NO_QUOTA_SECONDS
    return refusal if fold_name(refusal.code) in _NEVER or (is_new and lasts) else None


Scope = Literal["subscription", "resource group", "workspace"]
SETTINGS: Mapping[Scope, str] = {
    "subscription": "DTRAIN_AZURE_SUBSCRIPTION_ID",
    "resource group": "DTRAIN_AZURE_RESOURCE_GROUP",
    "workspace": "DTRAIN_AZURE_WORKSPACE",
}
_SCOPES: Mapping[str, Scope] = {
    "subscriptionnotfound": "subscription",
    "invalidsubscriptionid": "subscription",
    "resourcegroupnotfound": "resource group",
    "workspacenotfound": "workspace",
}
"""Codes, folded, that say by themselves what is missing."""
_QUOTED = re.compile(r"['\"‘“]([^'\"’”]+)['\"’”]")


def find_missing_scope(error: Any, workspace: str) -> Scope | None:
    """Return which of subscription, resource group and workspace is not there, by the body of a 404; None where the
    answer is about something within the workspace. The code of a parent or of any resource tells only with its name."""
    for part in error_parts(error):
        code = fold_name(part.code)
        if code in _SCOPES:
            return _SCOPES[code]
        if code in ("parentresourcenotfound", "resourcenotfound", "notfound"):
            quoted, own = [name.rstrip("/").casefold() for name in _QUOTED.findall(part.message)], workspace.casefold()
            if any(name.endswith(f"/workspaces/{own}") for name in quoted):
                return "workspace"
            if code == "parentresourcenotfound" and own in quoted:
                return "workspace"
    return None


def names_resource(error: Any, name: str) -> bool:
    """Return whether the body of a 404 names this job or compute, in a message or as the target of one of its
    errors."""
    word = re.compile(rf"(?i)(?<![\w-]){re.escape(name)}(?![\w-])")
    return any(word.search(text) for part in error_parts(error) for text in (part.message, part.target))


ClusterTrouble = Literal["", "refused", "lost"]
_TROUBLE: tuple[tuple[ClusterTrouble, re.Pattern[str]], ...] = (
    ("refused", re.compile(r"(?i)\bcluster has encountered (an )?unknown issue")),
    ("lost", re.compile(r"(?i)\bcluster is in (a )?failed state")),
    ("lost", re.compile(r"(?i)\b(cluster|compute( target)?)\b[^.\n]{0,80}\bdoes not exist")),
)


def read_cluster_trouble(message: str) -> ClusterTrouble:
    """Return what a job's error says of its compute: ``refused`` for one that never gets a node, and tells why in its
    own ``errors`` only; ``lost`` for one that is broken or gone; "" where it says nothing of it. Pure."""
    return next((trouble for trouble, words in _TROUBLE if words.search(message)), "")


def error_parts(error: Any) -> list[ErrorPart]:
    """Return all errors that an error holds, itself first: of dictionaries and lists as JSON has them, and of texts."""
    return list(_walk(error, 0))


def error_body_of(error: BaseException) -> Any:
    """Return the body of the service's answer that an error came of, or of one of its causes; None without one."""
    for item in error_chain(error):
        try:
            body = json.loads(item.response.text())  # type: ignore[attr-defined]
        except (AttributeError, TypeError, ValueError):  # no answer, one without text, or no JSON
            continue
        if isinstance(body, Mapping):
            return body
    return None


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes: some errors of the client hide the one that says why."""
    seen: set[int] = set()
    waiting: list[Any] = [error]
    while waiting:
        item = waiting.pop(0)
        if isinstance(item, BaseException) and id(item) not in seen:
            seen.add(id(item))
            yield item
            waiting += [getattr(item, "inner_exception", None), item.__cause__, item.__context__]


def _walk(node: Any, depth: int) -> Iterator[ErrorPart]:
    if depth > DEEPEST:
        return
    if isinstance(node, str):
        yield from _in_text(node, depth)
    elif isinstance(node, Mapping):
        fields = {fold_name(str(name)): value for name, value in node.items()}
        code, message, target = (str(fields.get(name) or "") for name in ("code", "message", "target"))
        if code or message or target:
            yield ErrorPart(code=code, message=message, depth=depth, target=target)
        for name, value in fields.items():
            if name == "message":
                yield from _in_text(str(value or ""), depth + 1)
            elif not isinstance(value, str):
                yield from _walk(value, depth + 1)
    elif isinstance(node, Sequence) and not isinstance(node, bytes):
        for item in node:
            yield from _walk(item, depth)


def _in_text(text: str, depth: int) -> Iterator[ErrorPart]:
    """Yield the errors within a message: as JSON, in a list, or by a known code among its words, which is no deeper
    than the message."""
    start = text.find("{")
    if start >= 0 and '"code"' in text:
        try:
            yield from _walk(json.JSONDecoder().raw_decode(text[start:])[0], depth)
            return
        except ValueError:
            pass
    for code, message in _LISTED.findall(text):
        yield ErrorPart(code=code, message=message, depth=depth)
    for word in _NAMED.findall(text):
        if fold_name(word) in _NEXT or fold_name(word) in _FATAL:
            yield ErrorPart(code=word, message=text, depth=depth - 1)


def _says_little(part: ErrorPart) -> int:
    """Return 0 for an error with a code of its own, 1 for one with a sentence of its own, 2 for one with neither."""
    if fold_name(part.code) not in _GENERAL:
        return 0
    return 2 if _GENERAL_SENTENCE.fullmatch(part.message) else 1


def _refusal(
    parts: Sequence[ErrorPart], part: ErrorPart, verdict: Any, retry_seconds: float = SCARCE_SECONDS
) -> SkuRefusal:
    message = part.message or next((other.message for other in reversed(parts) if other.message), "")
    line = " ".join(message.split())
    if len(line) > LONGEST_MESSAGE:
        line = line[: LONGEST_MESSAGE - 1] + "…"
    return SkuRefusal(code=part.code, message=line, verdict=verdict, retry_seconds=retry_seconds)


# Whether a launch that failed did so by itself or lost its nodes.
LOSS_CODES = {
    *("preemptionerror", "preempted", "jobpreempted", "nodepreempted", "nodelost", "nodeunusable", "nodeevicted"),
    *("nodefailure", "computenotfound"),
}
"""Codes of the service, folded. The first is reported (microsoft/MLOpsPython#346), the others are assumed."""
_USER_TEXT = re.compile(
    r"(?i)(\bTraceback \(most recent call last\)|(?<![\w'])(error|stderr|stdout|log)\s*:\s|\berror message\s*['\"]|"
    r"\bUser (program|script|code) failed with\b)"
)
"""Where the user's own output begins in a message: the service appends its end (``… for error details. Error: Traceback
…``, report Azure/azureml-examples#2614). Any word may stand there, so it is cut off, and never counts."""
_PREFIX = re.compile(r"(?i)^\W*(?:\w+(?:error|exception|failed|preempted|lost)\s*:\s*|AzureMLCompute job failed\.\s*)*")
_LOSS_SENTENCE = re.compile(
    # The first as in the report above, the others are assumed.
    r"(?i)(nodes? of this job (got|was|were) pre-?empted|received pre-?emption warning|"
    r"(the )?(job'?s )?nodes?\b[^.\n]{0,60}\b(was|were|is|are|became|got) "
    r"(lost|unreachable|unusable|removed|evicted|pre-?empted)|"
    r"(the )?job (was|got) (evicted|pre-?empted)|(the )?job lost (its |the |a )?nodes?\b|"
    r"(no|lost|missed) (the )?heartbeats?\b)"
)
_EXIT_CODE = re.compile(r"(?i)exit(?:ed)?(?: with)?(?: status)?[ -]?codes?[:= ]*\[?(-?\d+)")


def read_service_words(message: str) -> str:
    """Return the part of a job's error message that the service wrote itself."""
    found = _USER_TEXT.search(message)
    return (message if found is None else message[: found.start()]).strip()


def explain_service_loss(code: str, message: str) -> str:
    """Return the service's words for a job that lost its nodes; "" where it does not say so."""
    said = read_service_words(message)
    sentence = said[_PREFIX.match(said).end() :]  # type: ignore[union-attr]  # it matches nothing, too
    if fold_name(code) in LOSS_CODES or _LOSS_SENTENCE.match(sentence) or read_cluster_trouble(said):
        return ": ".join(filter(None, (code, said)))
    return ""


def explain_loss(
    exit_codes: Sequence[int], error_code: str, error_message: str, vanished: Sequence[int], was_stopped: bool
) -> str:
    """Return how a launch that failed lost its nodes or its processes' peers; "" where it failed by itself, or no
    witness can tell. The first witness that can tell counts; words of the user's output are none.

    ``exit_codes``: in the nodes' own records. ``error_code``, ``error_message``: the service's. ``vanished``: nodes
    that ended without a record. ``was_stopped``: the training recorded that it was told to end.
    """
    codes = (*exit_codes, *(int(code) for code in _EXIT_CODE.findall(read_service_words(error_message))))
    if any(is_failure(code) for code in codes):
        return ""
    if lost := [code for code in codes if is_loss(code)]:
        return ", ".join(dict.fromkeys(describe_exit(code) for code in lost))
    if said := explain_service_loss(error_code, error_message):
        return said
    if vanished:
        return f"node(s) {', '.join(map(str, vanished))} disappeared without a record"
    return "its processes were told to end (SIGTERM)" if was_stopped else ""
