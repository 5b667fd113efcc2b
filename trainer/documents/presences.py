"""The presence of nodes: one small file per incarnation of a node in the run directory, the base of every dollar.

Its fields, its file and its age belong here; `trainer.rundir.RunDir` reads and writes it, and
`trainer.observability.node_presence` records it from within a process.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from trainer.documents.schemas import make
from trainer.documents.strict_json import Document
from trainer.storage.base import Storage

NODES = "nodes"
NODE_FILE = re.compile(r"[a-z]\d{1,12}-n\d{1,12}(-s\d{1,12})?\.json")
INCARNATION_KEY = "stay"
"""The key of a node's incarnation in its file, as older versions wrote it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePresence:
    """One incarnation of a node: a replacement of a lost node is the next one. Times are Unix seconds, by a clock that
    does not jump (`trainer.runtime.clock`); ``ended_at`` is None until it has ended."""

    node_id: int
    launch: int
    """The start of the job by its cluster: 1, 2, …"""
    incarnation: int = 1
    """1 for the node that the launch began with; one more for each that took its place."""
    started_at: float
    """The time at which its first process was started."""
    ended_at: float | None = None
    """The time at which its last process had ended."""
    last_seen_at: float | None = None
    exit_codes: tuple[int, ...] = ()
    clock_jump_seconds: float = 0.0
    """Seconds by which its machine's clock has been set since, negative for back. None of the times includes it."""
    host: str = ""
    """The address under which other nodes reach it, where an engine placed it on a machine of its choice."""
    ready_at: float | None = None
    """When it was ready to take the place of the one before it, where that was still there; else None."""
    leaves_at: float | None = None
    """When it leaves at the latest, since its machine will be taken away; None while nothing says so."""
    leaves_because: str = ""
    preflight: str = ""
    """What failed of its pre-flight, so that none of its ranks was started; "" where nothing did, or none was made."""
    preflight_seconds: float = 0.0
    """How long its pre-flight took, from ``started_at`` on."""
    kept_since: float | None = None
    """The time at which its ranks had ended and it stayed for a person to look at; None where it does not."""
    kept_until: float | None = None
    """The time until which it stays at most."""

    def seconds(self, now: float) -> float:
        """Return the paid seconds so far: until the end, or until ``now``."""
        return max(0.0, (self.ended_at if self.ended_at is not None else now) - self.started_at)

    def heard_at(self, now: float) -> float:
        """Return when it was last heard of, by the clock of the caller, which was set together with the node's or was
        not: the time closer to ``now`` counts."""
        seen = self.last_seen_at or self.started_at
        return min(seen, seen + self.clock_jump_seconds, key=lambda at: abs(now - at))


def heartbeat_seconds(storage: Storage) -> float:
    """Return the seconds between two heartbeats of a node that keeps its own record; remote ones cost money."""
    return 2.0 if storage.is_local else 10.0


def stale_seconds(storage: Storage) -> float:
    """Return the seconds of silence after which a node is not well: it has missed at least five heartbeats, and on
    remote storage one of them may have been tried for as long as a request is (90 s,
    `trainer.storage.azure_account`)."""
    return 10.0 if storage.is_local else 120.0


def node_file(presence: NodePresence) -> str:
    return f"{NODES}/l{presence.launch:04d}-n{presence.node_id:03d}-s{presence.incarnation:03d}.json"


def presence_document(presence: NodePresence) -> dict[str, Any]:
    """Return the content of a presence's file."""
    document = asdict(presence)
    return document | {INCARNATION_KEY: document.pop("incarnation")}


def presence_of(data: Document) -> NodePresence:
    """Return the presence of a file's content that has passed `trainer.documents.schemas.PRESENCE`. Fields of later
    versions are left out. Raise `DamagedError` where it does not tell its launch."""
    # The latter of files that were written before nodes could be replaced.
    launch = data["generation" if "generation" in data and "launch" not in data else "launch"]
    return make(NodePresence, data, launch=launch, incarnation=data.get(INCARNATION_KEY, 1))
