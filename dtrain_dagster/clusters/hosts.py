"""Which machines of an engine no node is placed on for a time, and why: verdicts from what happened on them, and the
record of it that all jobs of a cluster share.

A verdict is cautious, since a wrong one starves people who wait: losses count only where the rest of the job went on,
few hosts are excluded at once, and a node that finds no other place is placed there again (`agent_placer`).
Preemption, drains, time limits, the program's own failures and slowness say nothing of a machine.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from trainer.documents.schemas import make, record_of

WINDOW_SECONDS = 3600.0
"""Seconds for which something that happened on a host counts, and for which a host is excluded after it."""
SHORT_SECONDS = 600.0
"""Seconds that a node had run at most for its loss to be one of `SHORT_LOSSES`."""
SHORT_LOSSES, LOSSES = 2, 3
"""Losses on one host within the window that exclude it: of nodes that had only begun, and of any."""
MOST_HOSTS = 4
"""Hosts that are excluded at most, the worst ones: more are no coincidence, and likely not their doing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEvent:
    """Something that happened on a host. Times are Unix seconds."""

    host: str
    """The machine, as its engine calls it."""
    at: float
    kind: Literal["lost", "unfit", "lifted"]
    """A node was lost there, while the others went on; failed its pre-flight; a person lifted the exclusion."""
    seconds: float = 0.0
    """How long a node that was lost had run."""
    why: str = ""
    job_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusion:
    """A host on which no node is placed for now."""

    host: str
    why: str
    until: float
    """Unix seconds."""


def judge_hosts(events: Iterable[HostEvent], now: float) -> list[Exclusion]:
    """Return the hosts that are excluded at ``now`` (Unix seconds), the worst first. Pure."""
    by_host: dict[str, list[HostEvent]] = {}
    for event in sorted(events, key=lambda event: event.at):
        if event.kind == "lifted":
            by_host.pop(event.host, None)
        elif now - event.at < WINDOW_SECONDS:
            by_host.setdefault(event.host, []).append(event)
    judged = [found for host, each in by_host.items() if (found := _judge(host, each)) is not None]
    judged.sort(key=lambda found: found[0], reverse=True)
    return [exclusion for _, exclusion in judged[:MOST_HOSTS]]


def _judge(host: str, events: Sequence[HostEvent]) -> tuple[tuple[int, int, float], Exclusion] | None:
    """Return how bad a host is, and why it is excluded, from what counts of it; None where it is not."""
    unfit = [event for event in events if event.kind == "unfit"]
    lost = [event for event in events if event.kind == "lost"]
    short = [event for event in lost if event.seconds < SHORT_SECONDS]
    if unfit:
        why = f"it failed its pre-flight: {unfit[-1].why}"
    elif len(short) >= SHORT_LOSSES:
        why = f"{len(short)} nodes were lost there soon after they began ({short[-1].why})"
    elif len(lost) >= LOSSES:
        why = f"{len(lost)} nodes were lost there within an hour ({lost[-1].why})"
    else:
        return None
    last = (unfit or lost)[-1].at
    return (len(unfit), len(lost), last), Exclusion(host=host, why=why, until=last + WINDOW_SECONDS)


class HostRecord:
    """What happened on the hosts of one cluster, as one file of a home: a line for each event, which any number of
    supervisors add to. Each line is appended in one write; one that is lost or torn is one fault less."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_cluster(cls, home: Path, cluster_key: str) -> HostRecord:
        """Return the record of a cluster (`dtrain_dagster.settings.cluster_kinds.cluster_key`) in a home."""
        return cls(home / "clusters" / cluster_key / "hosts.jsonl")

    def add(self, event: HostEvent) -> None:
        """Add an event. Raise OSError where it cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, json.dumps(asdict(event)).encode() + b"\n")
        finally:
            os.close(file)

    def excluded(self, now: float) -> list[Exclusion]:
        """Return `judge_hosts` of what was recorded; lines that are no events are left out. Raise OSError where it
        cannot be read."""
        found, check = [], record_of(HostEvent)
        for line in self.path.read_bytes().splitlines() if self.path.exists() else ():
            with contextlib.suppress(ValueError):
                if not check(document := json.loads(line)):
                    found.append(make(HostEvent, document))
        return judge_hosts(found, now)

    def lift(self, host: str, now: float) -> None:
        """End the exclusion of a host: what happened there before ``now`` no longer counts."""
        self.add(HostEvent(host=host, at=now, kind="lifted", why="a person lifted it"))
