"""Which machines of an engine no node is placed on for a time, and why: verdicts from what happened on them, and the
record of it that all jobs of a cluster share.

A verdict is cautious, since a wrong one starves people who wait: losses count only where the rest of the job went on,
few hosts may be excluded at once, and a node that finds no other place is placed there again (`agent_placer`).
Preemption, drains, time limits, the program's own failures and slowness say nothing of a machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from trainer.documents.schemas import make, record_of

WINDOW_SECONDS = 3600.0
"""Seconds for which something that happened on a host counts, and for which a host is excluded after it."""
SEEN_SECONDS = 86400.0
"""Seconds for which a host counts as one of the cluster's after a node began there."""
SHORT_SECONDS = 600.0
"""Seconds that a node had run at most for its loss to be one of `SHORT_LOSSES`."""
SHORT_LOSSES, LOSSES = 2, 3
"""Losses on one host within the window that exclude it: of nodes that had only begun, and of any."""
SHARE = 0.2
"""The share of a cluster's hosts that is excluded at most; of a small cluster one."""
_KEEP_BYTES = 256 << 10
"""Bytes of the record above which what no longer counts is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEvent:
    """Something that happened on a host. Times are Unix seconds."""

    host: str
    """The machine, as its engine calls it."""
    at: float
    kind: Literal["began", "lost", "unfit", "lifted"]
    """A node began there; was lost there, while the others went on; failed its pre-flight; a person lifted the
    exclusion."""
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
    by_host: dict[str, list[HostEvent]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.at):
        if event.kind == "lifted":
            by_host[event.host] = [each for each in by_host[event.host] if each.kind == "began"]
        elif now - event.at < (SEEN_SECONDS if event.kind == "began" else WINDOW_SECONDS):
            by_host[event.host].append(event)
    seen = sum(bool(each) for each in by_host.values())
    judged = [found for host, each in by_host.items() if (found := _judge(host, each)) is not None]
    judged.sort(key=lambda found: found[0], reverse=True)
    return [exclusion for _, exclusion in judged[: min(max(1, int(SHARE * seen)), seen - 1)]]


def _judge(host: str, events: Sequence[HostEvent]) -> tuple[tuple[int, int, float], Exclusion] | None:
    """Return why a host is excluded, and how bad it is, from what counts of it; None where it is not."""
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
    supervisors add to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_cluster(cls, home: Path, cluster_key: str) -> HostRecord:
        """Return the record of a cluster (`dtrain_dagster.settings.cluster_kinds.cluster_key`) in a home."""
        return cls(home / "clusters" / cluster_key / "hosts.jsonl")

    def add(self, event: HostEvent) -> None:
        """Add an event; once the file is large, what no longer counts goes. Raise OSError where it cannot be
        written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if file.tell() > _KEEP_BYTES:
                file.seek(0)
                kept = [each for each in _parse(file.read()) if event.at - each.at < SEEN_SECONDS]
                file.truncate(0)
                file.write(b"".join(map(_line, kept)))
            file.write(_line(event))

    def events(self) -> list[HostEvent]:
        """Return what was recorded, in order. Lines that are no events are left out."""
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return _parse(file.read())
        return []

    def excluded(self, now: float) -> list[Exclusion]:
        """Return `judge_hosts` of what was recorded. Raise OSError where it cannot be read."""
        return judge_hosts(self.events(), now)

    def lift(self, host: str, now: float) -> None:
        """End the exclusion of a host: what happened there before ``now`` no longer counts."""
        self.add(HostEvent(host=host, at=now, kind="lifted", why="a person lifted it"))


def _line(event: HostEvent) -> bytes:
    return json.dumps(asdict(event)).encode() + b"\n"


def _parse(data: bytes) -> list[HostEvent]:
    found, check = [], record_of(HostEvent)
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            if not check(document := json.loads(line)):
                found.append(make(HostEvent, document))
    return found
