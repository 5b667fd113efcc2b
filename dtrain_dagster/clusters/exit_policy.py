"""The decision that follows when processes of a job have ended: pure functions of their exit codes.

A process of `python -m trainer` regroups when a node is lost, and its exit code says why it ended; the codes and their
meaning are in `trainer.exit_codes`. Here is how a cluster reacts to them, and to signals, which happen to a process and
are not chosen by it.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.documents.presences import NodePresence
from trainer.exit_codes import DONE, EVICTED, FAILED, LOST, MEANINGS, UNFIT, UNUSABLE, is_loss


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """The end of a process of a job."""

    rank: int
    node_id: int
    code: int
    """Exit code, or minus the number of the signal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedNode:
    """The newest incarnation of a node, as its placer saw it last."""

    node_id: int
    incarnation: int = 1
    codes: tuple[int | None, ...]
    """The exit codes by local rank, or minus the number of the signal; None for a process that runs."""
    state: Literal["pending", "running", "kept", "gone"] = "running"
    """``pending``: the engine has not started it yet. ``kept``: its ranks have ended, and it is left in place for a
    person. ``gone``: nothing of it is left."""
    gone_seconds: float | None = None
    """Seconds since nothing of the node is left, children of its processes included; None while something is."""
    is_taken: bool = False
    """Whether it was taken away, as by preemption, and nothing has failed."""
    presence: NodePresence | None = None
    """Its record in the run directory; None while it is pending."""
    reason: str = ""
    """Why it waits, or why it ended, in the words of the engine; "" where the exit codes say all."""
    queued_at: float | None = None
    """The time at which the engine was asked for it, in Unix seconds, while it is pending."""

    @property
    def runs(self) -> bool:
        """Return whether a process of the node runs."""
        return None in self.codes

    @property
    def is_lost(self) -> bool:
        """Return whether a process of the node was killed or evicted, or lost its peers: the rest of the node is then
        useless."""
        return any(code is not None and is_loss(code) for code in self.codes)

    @property
    def is_unfit(self) -> bool:
        """Return whether the node failed its pre-flight, so that nothing of it had begun."""
        return UNFIT in self.codes


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitDecision:
    """The next action of the supervisor.

    ``wait``; ``replace`` these nodes; ``relaunch`` with as many nodes as these, from the latest checkpoint;
    ``dismiss``: the work is done, processes that still run have a moment to notice; ``succeed``; ``fail``: a process
    failed, its peers have a moment to log what they saw; ``give_up``: all have ended, and the reason says why the job
    did not succeed.
    """

    action: Literal["wait", "replace", "relaunch", "dismiss", "succeed", "fail", "give_up"]
    nodes: tuple[int, ...] = ()
    reason: str = ""


WAIT = ExitDecision(action="wait")
PREEMPTIONS = 10
"""Nodes that were taken away and are replaced, for each lost one that is: a cheap market takes often, and it proves
nothing of the job."""


def decide_after_exit(
    nodes: Sequence[PlacedNode],
    finished: bool,
    replacements_left: int,
    launches_left: int,
    delay_seconds: float,
    preemptions_left: int = 0,
) -> ExitDecision:
    """Return the action for a job whose processes regroup by themselves.

    ``finished``: the result says that the work is done. ``delay_seconds``: the time that a node is gone before another
    replaces it. ``preemptions_left``: how many that were taken away may be replaced, beside those that were lost.
    """
    codes = [code for node in nodes for code in node.codes]
    if any(code is not None and is_failure(code) for code in codes):
        return ExitDecision(action="fail")
    if any(node.runs for node in nodes):
        if 0 in codes:  # it had nothing more to do: the others end soon, and no replacement is needed
            return ExitDecision(action="dismiss") if finished else WAIT
        gone = [
            node
            for node in nodes
            if node.is_lost and node.gone_seconds is not None and node.gone_seconds >= delay_seconds
        ]
        due = [
            *[node.node_id for node in gone if not node.is_taken][: max(0, replacements_left)],
            *[node.node_id for node in gone if node.is_taken][: max(0, preemptions_left)],
        ]
        if due and any(node.runs and not node.is_lost for node in nodes):
            return ExitDecision(action="replace", nodes=tuple(sorted(due)))
        return WAIT
    if any(node.gone_seconds is None for node in nodes):
        return WAIT
    if finished:
        return ExitDecision(action="succeed")
    if replacements_left > 0 and all(node.is_unfit for node in nodes):  # other machines may do
        due = [node.node_id for node in nodes][:replacements_left]
        return ExitDecision(action="replace", nodes=tuple(due))
    lost_peers = tuple(node.node_id for node in nodes if LOST in node.codes)
    # If all were killed, no process is left to report that a relaunch helps. It does, unless they were told to stop.
    # Those that had left already had nothing more to do, and what the others had is in the last checkpoint.
    working = [node for node in nodes if set(node.codes) != {0}]
    were_killed = all(is_killing(code) for node in working for code in node.codes if code != 0)
    remaining = tuple(node.node_id for node in working) if were_killed else lost_peers
    if remaining and launches_left > 0:
        return ExitDecision(action="relaunch", nodes=remaining)
    return ExitDecision(action="give_up", reason=_why(codes, bool(lost_peers)))


def decide_plainly(nodes: Sequence[PlacedNode]) -> ExitDecision:
    """Return the action for a job whose processes need each other: any failure ends it."""
    if any(code for node in nodes for code in node.codes):
        return ExitDecision(action="fail")
    if any(node.runs or node.gone_seconds is None for node in nodes):
        return WAIT
    return ExitDecision(action="succeed")


def is_killing(code: int | None) -> bool:
    """Return whether a process was ended by a signal without having been asked to stop."""
    return code is not None and code not in (EVICTED, -signal.SIGTERM) and (code < 0 or code > 128)


def is_failure(code: int) -> bool:
    """Return whether a process failed in a way that would happen again."""
    return code != 0 and not is_loss(code)


def _why(codes: Sequence[int | None], lost_peers: bool) -> str:
    if codes and all(code == UNFIT for code in codes):
        return "no node passed its pre-flight"
    if lost_peers:
        return "the nodes could not regroup, and starting them again did not help"
    if all(code == 0 for code in codes):
        return "all processes exited normally, but the result does not say that the training is complete"
    if all(code in (EVICTED, -signal.SIGTERM) for code in codes):
        return "evicted: all nodes were told to stop (SIGTERM)"
    if all(is_killing(code) for code in codes if code != 0):
        return "all nodes are gone, and starting them again did not help"
    return "all nodes are gone"


def exit_code(code: int) -> int:
    """Return the code as a shell gives it: 128 + the number of the signal."""
    return code if code >= 0 else 128 - code


def blame(end: ProcessEnd) -> tuple[int, int]:
    """Return a sort key for failures that were noticed at the same moment: the likeliest cause sorts first. A process
    that was killed, or that refuses its configuration, takes its peers down; the others only report that a peer was
    lost."""
    if end.code in (EVICTED, -signal.SIGTERM):
        return 4, end.rank
    if end.code == LOST:
        return 3, end.rank
    return (0 if end.code < 0 else 1 if end.code == UNUSABLE else 2), end.rank


def describe_exit(code: int) -> str:
    """Return the exit in words: ``exit code 2, unusable configuration or data``, ``killed by SIGKILL``…"""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"
    meaning = "" if code in (DONE, FAILED) else MEANINGS.get(code, "")
    return f"exit code {code}, {meaning}" if meaning else f"exit code {code}"
