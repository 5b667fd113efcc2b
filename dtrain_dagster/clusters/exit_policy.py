"""What to do when processes of a job have ended: pure, from their exit codes to a decision.

A process of `python -m trainer` regroups when a node is lost, and its exit code says why it ended; the codes and their
meaning are in `trainer.exit_codes`. What belongs here is what a cluster does about them, and about signals, which are
what happens to a process rather than what it says.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.exit_codes import DONE, EVICTED, FAILED, LOST, MEANINGS, UNUSABLE


@dataclass(frozen=True, slots=True)
class Failure:
    """How the process that failed first ended."""

    rank: int
    node_id: int
    code: int
    """Exit code, or minus the number of the signal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """A node, in its newest stay."""

    node_id: int
    codes: tuple[int | None, ...]
    """By local rank: exit code, or minus the number of the signal; None for a process that runs."""
    gone_seconds: float | None = None
    """Since when nothing of it is left, children of its processes included; None while something is."""

    @property
    def runs(self) -> bool:
        return None in self.codes

    @property
    def is_lost(self) -> bool:
        """A process of it was killed or evicted, or lost its peers: what is left of the node is of no use."""
        return any(code is not None and is_loss(code) for code in self.codes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitDecision:
    """What to do now.

    ``wait``; ``replace`` these nodes; ``relaunch`` with as many nodes as these, from the latest checkpoint;
    ``dismiss``: the work is done, who still runs may take a moment to see it; ``succeed``; ``fail``: a process failed,
    its peers may take a moment to say what they saw; ``give_up``: all have ended, the reason says why it is no success.
    """

    action: Literal["wait", "replace", "relaunch", "dismiss", "succeed", "fail", "give_up"]
    nodes: tuple[int, ...] = ()
    reason: str = ""


WAIT = ExitDecision(action="wait")


def decide_after_exit(
    nodes: Sequence[NodeFacts], finished: bool, replacements_left: int, launches_left: int, delay_seconds: float
) -> ExitDecision:
    """For a job whose processes regroup by themselves.

    ``finished``: the result says that the work is done. ``delay_seconds``: how long a node is gone before another takes
    its place.
    """
    codes = [code for node in nodes for code in node.codes]
    if any(code is not None and is_failure(code) for code in codes):
        return ExitDecision(action="fail")
    if any(node.runs for node in nodes):
        if 0 in codes:  # all end together: who has not yet is about to, and nobody need come any more
            return ExitDecision(action="dismiss") if finished else WAIT
        due = [
            node.node_id
            for node in nodes
            if node.is_lost and node.gone_seconds is not None and node.gone_seconds >= delay_seconds
        ]
        if due and replacements_left > 0 and any(node.runs and not node.is_lost for node in nodes):
            return ExitDecision(action="replace", nodes=tuple(due[:replacements_left]))
        return WAIT
    if any(node.gone_seconds is None for node in nodes):
        return WAIT
    if finished:
        return ExitDecision(action="succeed")
    lost_peers = tuple(node.node_id for node in nodes if LOST in node.codes)
    # Killed to the last, nobody is left who could say that starting again helps. It does, unless they were told to go.
    remaining = tuple(node.node_id for node in nodes) if all(map(is_killing, codes)) else lost_peers
    if remaining and launches_left > 0:
        return ExitDecision(action="relaunch", nodes=remaining)
    return ExitDecision(action="give_up", reason=_why(codes, bool(lost_peers)))


def decide_plainly(nodes: Sequence[NodeFacts]) -> ExitDecision:
    """For a job whose processes need each other: whichever fails ends it."""
    if any(code for node in nodes for code in node.codes):
        return ExitDecision(action="fail")
    if any(node.runs or node.gone_seconds is None for node in nodes):
        return WAIT
    return ExitDecision(action="succeed")


def is_loss(code: int) -> bool:
    """It was killed, evicted, or lost its peers. Codes above 128 are a shell's words for a signal."""
    return code < 0 or code == LOST or code > 128


def is_killing(code: int | None) -> bool:
    """It was ended by a signal, and was not asked to go."""
    return code is not None and code not in (EVICTED, -signal.SIGTERM) and (code < 0 or code > 128)


def is_failure(code: int) -> bool:
    """It failed in a way that would come again."""
    return code != 0 and not is_loss(code)


def _why(codes: Sequence[int | None], lost_peers: bool) -> str:
    if lost_peers:
        return "the nodes could not regroup, and starting them again did not help"
    if all(code == 0 for code in codes):
        return "all processes ended in order, but the result does not say that the training is done"
    if all(code in (EVICTED, -signal.SIGTERM) for code in codes):
        return "evicted: all nodes were told to go (SIGTERM)"
    if all(map(is_killing, codes)):
        return "all nodes are gone, and starting them again did not help"
    return "all nodes are gone"


def exit_code(code: int) -> int:
    """As a shell gives it: 128 + the number of the signal."""
    return code if code >= 0 else 128 - code


def blame(failure: Failure) -> tuple[int, int]:
    """Sorts failures that were noticed at the same moment: the likeliest cause first. A process that was killed, or
    that refuses its configuration, takes its peers down; that a peer was lost is what the others die of."""
    if failure.code in (EVICTED, -signal.SIGTERM):
        return 4, failure.rank
    if failure.code == LOST:
        return 3, failure.rank
    return (0 if failure.code < 0 else 1 if failure.code == UNUSABLE else 2), failure.rank


def describe_exit(code: int) -> str:
    """``exit code 2, unusable configuration or data``, ``killed by SIGKILL``…"""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"
    meaning = "" if code in (DONE, FAILED) else MEANINGS.get(code, "")
    return f"exit code {code}, {meaning}" if meaning else f"exit code {code}"
