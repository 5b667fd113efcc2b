"""The interface between the supervisor of a job and whatever runs its nodes.

A `Placer` starts nodes, says how they are, ends them and brings their logs. It decides nothing: which node is replaced,
and when a job has failed, is in `clusters.exit_policy` for all placers alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from dtrain_dagster.clusters.exit_policy import NodeFacts
from trainer.documents.presences import NodePresence


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedNode:
    """The newest incarnation of a node, as its placer saw it last."""

    node_id: int
    incarnation: int
    codes: tuple[int | None, ...]
    """The exit codes by local rank, or minus the number of the signal; None for a process that runs or will run."""
    state: Literal["pending", "running", "gone"]
    """``pending``: the engine has not started it yet. ``gone``: nothing of it is left."""
    gone_at: float | None = None
    """Time of `time.monotonic` at which it was seen that nothing of the node was left; None before."""
    presence: NodePresence | None = None
    """Its record in the run directory; None while it is pending."""
    reason: str = ""
    """Why it waits, or why it ended, in the words of the engine; "" where the exit codes say all."""
    queued_at: float | None = None
    """The time at which the engine was asked for it, in Unix seconds, while it is pending."""
    host: str = ""
    """The machine that it runs on, as the engine calls it."""

    @property
    def alive(self) -> bool:
        """Return whether a process of the node runs, or will run once the node has its place."""
        return None in self.codes

    @property
    def gone(self) -> bool:
        """Return whether nothing of the node is left."""
        return self.gone_at is not None

    def facts(self) -> NodeFacts:
        """Return what `clusters.exit_policy` decides from."""
        since = None if self.gone_at is None else time.monotonic() - self.gone_at
        return NodeFacts(node_id=self.node_id, codes=self.codes, gone_seconds=since)


class Placer(Protocol):
    """What runs the nodes of one job. One thread calls it."""

    poll_seconds: float
    """Seconds between two looks."""

    def begin_launch(self, launch: Mapping[str, Any]) -> None:
        """Prepare a launch (as in ``launch.json``): its secret, its port. Nodes of an earlier one are forgotten."""
        ...

    def resume_launch(self, launch: Mapping[str, Any]) -> set[int]:
        """Find the nodes of a launch that another supervisor began, and return their ids. Raise `NotImplementedError`
        where nodes end with their supervisor."""
        ...

    def start(self, node_id: int, incarnation: int) -> None:
        """Start one incarnation of a node. Raise `trainer.node.environment.LaunchError` where that is impossible for
        good, OSError where it may succeed later."""
        ...

    def look(self) -> Mapping[int, PlacedNode]:
        """Return the newest incarnation of each node that was started; write what is new about their presences."""
        ...

    def end(self, node_ids: Iterable[int], grace: float) -> None:
        """Ask these nodes to end (SIGTERM), and end them by force after ``grace`` seconds, while `look` is called. A
        second call can only shorten the grace."""
        ...

    def collect_logs(self, node_id: int) -> None:
        """Bring what the node has printed into the run directory, before somebody reads it there."""
        ...

    def sweep(self, seconds: float) -> None:
        """End whatever the nodes of this job may have left behind, for at most that long."""
        ...
