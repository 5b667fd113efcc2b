"""Whether a launch that failed did so by itself or lost its nodes: a table of witnesses, the most reliable first. Pure.

The service appends the end of the user's own output to its message (``… for error details. Error: Traceback …``, report
Azure/azureml-examples#2614), and any word may stand there: it is cut off, and never counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dtrain_dagster.clusters.azure_ml.refusals import read_cluster_trouble
from dtrain_dagster.clusters.azure_ml.sku_chain import fold_name
from dtrain_dagster.clusters.exit_policy import describe_exit, is_failure, is_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureWitnesses:
    """All that is known of why a launch failed."""

    exit_codes: tuple[int, ...] = ()
    """Codes in the nodes' own records."""
    error_code: str = ""
    error_message: str = ""
    """Code and message of the service; the message may end with the user's own output."""
    vanished: tuple[int, ...] = ()
    """Nodes that ended without a record."""
    was_stopped: bool = False
    """Whether the training recorded that it was told to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureCause:
    """Why a launch failed. ``kind``: ``own`` where it would fail again, ``lost`` where it lost nodes or peers,
    ``unknown`` where no witness says."""

    kind: Literal["own", "lost", "unknown"]
    words: str = ""


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


def find_failure_cause(seen: FailureWitnesses) -> FailureCause:
    """Return why a launch failed, by the first witness that can tell."""
    return next(filter(None, (ask(seen) for _, ask in WITNESSES)), FailureCause(kind="unknown"))


def _ask_exit_codes(seen: FailureWitnesses) -> FailureCause | None:
    told = (int(code) for code in _EXIT_CODE.findall(read_service_words(seen.error_message)))
    codes = (*seen.exit_codes, *told)
    if any(is_failure(code) for code in codes):
        return FailureCause(kind="own")
    if lost := [code for code in codes if is_loss(code)]:
        return FailureCause(kind="lost", words=", ".join(dict.fromkeys(describe_exit(code) for code in lost)))
    return None


def _ask_service(seen: FailureWitnesses) -> FailureCause | None:
    said = explain_service_loss(seen.error_code, seen.error_message)
    return FailureCause(kind="lost", words=said) if said else None


def _ask_vanished_nodes(seen: FailureWitnesses) -> FailureCause | None:
    words = f"node(s) {', '.join(map(str, seen.vanished))} disappeared without a record"
    return FailureCause(kind="lost", words=words) if seen.vanished else None


def _ask_training(seen: FailureWitnesses) -> FailureCause | None:
    words = "its processes were told to end (SIGTERM)"
    return FailureCause(kind="lost", words=words) if seen.was_stopped else None


WITNESSES: tuple[tuple[str, Callable[[FailureWitnesses], FailureCause | None]], ...] = (
    ("exit codes, of the nodes' records and in the service's own words", _ask_exit_codes),
    ("the service's code and its own words", _ask_service),
    ("nodes that ended without a record", _ask_vanished_nodes),
    ("the training's own record of its end", _ask_training),
)
"""What is asked, in order. The words of the user's output are not in it."""
