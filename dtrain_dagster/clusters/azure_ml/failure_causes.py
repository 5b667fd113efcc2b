"""Whether a launch that failed did so by itself or lost its nodes. Pure.

The service appends the end of the user's own output to its message (``… for error details. Error: Traceback …``, report
Azure/azureml-examples#2614), and any word may stand there: it is cut off, and never counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dtrain_dagster.clusters.azure_ml.refusals import read_cluster_trouble
from dtrain_dagster.clusters.azure_ml.sku_chain import fold_name
from dtrain_dagster.clusters.exit_policy import describe_exit, is_failure, is_loss

LOSS_CODES = {
    "preemptionerror", "preempted", "jobpreempted", "nodepreempted", "nodelost", "nodeunusable", "nodeevicted",
    "nodefailure", "computenotfound",
}  # fmt: skip
"""Codes of the service, folded. The first is reported (microsoft/MLOpsPython#346), the others are assumed."""
_USER_TEXT = re.compile(
    r"(?i)(\bTraceback \(most recent call last\)|(?<![\w'])(error|stderr|stdout|log)\s*:\s|\berror message\s*['\"]|"
    r"\bUser (program|script|code) failed with\b)"
)
"""Where the user's own output begins in a message."""
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
