"""The queue of runs that wait for capacity. It is kept in storage, so it survives the process that filled it.

    queue/<ticket>.json     one waiting run; a ticket's name begins with its time of arrival, so names sort by it

A run that finds no capacity leaves a ticket and ends. A sensor starts it again when it is due, first come, first
served. The run deletes its ticket once it has nodes: a cloud may take an order and never carry it out, and then its
place is still there. `decide_turns`, a pure function, decides which run starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from trainer.documents.reader import read_document, warn_once
from trainer.documents.schemas import make, moment, record_of
from trainer.errors import DamagedError
from trainer.storage.open import open_storage

TICKET_TAG = "dtrain/ticket"
ATTEMPT_TAG = "dtrain/attempt"
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 300.0, 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """A waiting run's entry in the queue. Times are Unix seconds."""

    ticket: str
    queued_at: Annotated[float, moment]
    deadline_at: Annotated[float, moment]
    retry_at: Annotated[float, moment]
    """The earliest time of the next try."""
    attempt: int
    """The number of the next try, counted from 1; each refusal raises it."""
    run_id: str
    """The Dagster run that was refused last."""
    reason: str
    assets: tuple[str, ...]
    """The assets that the run materializes; empty for all."""
    run_config: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    """Further tags of each of its runs, such as the cause of the run."""
    cluster: str = ""
    """The cluster that it waits for (`GPUClusterResource.cluster_key`); "" for any."""


@dataclass(frozen=True, slots=True)
class Due:
    """The sensor's next actions: the ticket to start, and the tickets to remove."""

    start: Ticket | None = None
    expired: tuple[Ticket, ...] = ()
    """Tickets whose deadline has passed."""
    ended: tuple[Ticket, ...] = ()
    """Tickets whose run ended for another reason, without asking for a cluster. Waiting would not help them."""


def decide_turns(
    tickets: Sequence[Ticket], running: frozenset[str], finished: frozenset[tuple[str, int]], now: float
) -> Due:
    """Return the ticket to start now, and those that expired or ended. Pure.

    ``running`` holds tickets with a run that has not ended, ``finished`` (ticket, attempt) of runs that have. One run
    is tried at a time, the oldest ticket first: two would ask for the same nodes.
    """
    at_rest = [item for item in tickets if item.ticket not in running]
    ended = tuple(item for item in at_rest if (item.ticket, item.attempt) in finished)
    expired = tuple(item for item in at_rest if item not in ended and now >= item.deadline_at)
    waiting = [item for item in at_rest if item not in ended + expired]
    start = waiting[0] if waiting and not running and now >= waiting[0].retry_at else None
    return Due(start=start, expired=expired, ended=ended)


def pause_seconds(refusals: int) -> float:
    """Return the seconds to wait before the next try: 5, 10, 20 … 60 minutes."""
    return min(FIRST_PAUSE_SECONDS * 2 ** (refusals - 1), LONGEST_PAUSE_SECONDS)


class WaitingList:
    """The queue's storage: tickets as files in ``<storage>/queue``. Each cluster has a queue of its own: nodes that are
    not to be had on one keep nobody waiting for another."""

    def __init__(self, storage_uri: str, cluster: str = "") -> None:
        """``cluster``: the one whose queue it is; "" for those of all."""
        self.storage, self.cluster = open_storage(f"{storage_uri}/queue"), cluster

    def tickets(self) -> list[Ticket]:
        """Return the tickets, in order of arrival. A damaged ticket is left out with a warning."""
        found = []
        for name in self.storage.list():
            try:
                data = read_document(self.storage, name, record_of(Ticket))
            except DamagedError as error:  # of one run: the others wait no longer for it
                warn_once(f"a waiting run is skipped: {error}")
                continue
            if data is not None:  # else given back meanwhile
                found.append(make(Ticket, data))
        return [item for item in found if not self.cluster or item.cluster in ("", self.cluster)]

    def put(self, ticket: Ticket) -> int:
        """Write or replace a ticket; return its position in the queue, counted from 1."""
        self.storage.write(f"{ticket.ticket}.json", json.dumps(asdict(ticket), indent=1).encode())
        return [item.ticket for item in self.tickets()].index(ticket.ticket) + 1

    def find(self, ticket: str) -> Ticket | None:
        """Return the ticket of this name, or None."""
        return next((item for item in self.tickets() if item.ticket == ticket), None)

    def remove(self, ticket: str) -> None:
        """Delete the ticket of this name, if it is there."""
        self.storage.delete(f"{ticket}.json")


def new_ticket(
    run_id: str, assets: Sequence[str], run_config: Mapping[str, Any], reason: str, now: float,
    deadline_seconds: float, not_before: float = 0.0, tags: Mapping[str, str] | None = None,
    since: float | None = None, cluster: str = "",
) -> Ticket:  # fmt: skip
    """Return the ticket of a run that was refused for the first time. ``not_before``: the cloud's time for the next
    try. ``since``: the time from which it has waited for nodes in the cloud's own queue; it stands before whoever came
    later."""
    queued_at = now if since is None else min(since, now)
    return Ticket(
        ticket=f"{int(queued_at * 1000):014d}-{run_id[:8]}",
        queued_at=queued_at,
        deadline_at=queued_at + deadline_seconds,
        retry_at=max(now + pause_seconds(1), not_before),
        attempt=2,
        run_id=run_id,
        reason=reason,
        assets=tuple(assets),
        run_config=dict(run_config),
        tags=dict(tags or {}),
        cluster=cluster,
    )


def refused_again(ticket: Ticket, run_id: str, reason: str, now: float, not_before: float = 0.0) -> Ticket:
    """Return the ticket after one more refused try. Its place in the queue stays."""
    retry_at = max(now + pause_seconds(ticket.attempt), not_before)
    return replace(ticket, attempt=ticket.attempt + 1, run_id=run_id, reason=reason, retry_at=retry_at)
