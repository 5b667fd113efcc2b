"""What a fleet remembers: ``<home>/fleets/<name>``, one document per fact, each written completely or not at all.

    fleet.json              its limits
    jobs/<job_id>.json      a job as its source gave it, and its order; written before anything of it is bought
    states/<job_id>.json    how it stands: its state, nodes, grant and bill
    source.json             whether the source may give more jobs
    waits.json              why jobs wait
    cancel.json             somebody wants the fleet to end
    orchestrator.lock       held by the one process that may decide

It lies beside the orders (`dtrain_dagster.jobs.orders`), where nodes in the cloud cannot write: a node that could raise
its own grant would spend what others were promised. What nodes are to know, their limit, is in their run directory.

A grant is written here before nodes may see it, and taken back only after the nodes have gone. A process that dies at
any point between two documents leaves a sum of grants that is within the budget.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dtrain_dagster.fleet.grants import Standing
from dtrain_dagster.fleet.jobs import FleetError, FleetJob, FleetLimits, FleetState, JobOrder
from trainer.config import parse_job
from trainer.documents.places import PlaceError, checked_id
from trainer.errors import DamagedError
from trainer.runtime.file_lock import hold_lock
from trainer.storage.open import open_storage

FOLDER = "fleets"
FLEET, JOBS, STATES = "fleet.json", "jobs", "states"
SOURCE, WAITS, CANCEL = "source.json", "waits.json", "cancel.json"
LOCK = "orchestrator.lock"
LOCK_SECONDS = 2.0
"""Seconds that a second orchestrator waits before it is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptState:
    """How a job of a fleet stands, as it is remembered."""

    state: FleetState = FleetState.WAITING
    nodes: int = 0
    grant_units: int = 0
    paid_units: int = 0
    """Its bill, when it was last known; final as soon as it has no nodes."""
    node_seconds: float = 0.0
    """The seconds of that bill."""
    reason: str = ""
    launches: int = 0
    """How often it was given nodes."""
    before: str = ""
    """The launch that its run directory held when it was last given nodes: while it is the same, nothing was started
    yet."""
    launched_at: float | None = None
    not_before: float = 0.0
    failures: int = 0
    """Launches in a row that ended without a result of their own."""
    left_node_seconds: float | None = None
    """Work that was left when its last launch ended, as on one node."""
    left_spread: float | None = None

    def settled(self, state: FleetState, reason: str, paid_units: int, node_seconds: float) -> KeptState:
        """Return the state without nodes: what it was promised and did not use is taken back."""
        return replace(
            self,
            state=state,
            nodes=0,
            grant_units=paid_units,
            paid_units=paid_units,
            node_seconds=node_seconds,
            reason=reason,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A job of a fleet, and how it stands."""

    number: int
    job: FleetJob
    kept: KeptState

    def standing(self) -> Standing:
        """Return what decisions are made from."""
        kept = self.kept
        return Standing(
            job=self.job, number=self.number, state=kept.state, nodes=kept.nodes, paid_units=kept.paid_units,
            grant_units=kept.grant_units, left_node_seconds=kept.left_node_seconds, left_spread=kept.left_spread,
            launched_at=kept.launched_at, not_before=kept.not_before,
        )  # fmt: skip


class FleetRecords:
    """The record of one fleet. Of its writing methods only the holder of `sole_orchestrator` may call any but
    `ask_to_cancel`."""

    def __init__(self, home: Path, name: str) -> None:
        try:
            self.name = checked_id(name, "the name of the fleet")
        except PlaceError as error:
            raise FleetError(str(error)) from None
        self.storage = open_storage(str(Path(home) / FOLDER / name))

    @contextmanager
    def sole_orchestrator(self) -> Iterator[None]:
        """Hold the fleet within the block. Raise `FleetError` where another process has it."""
        folder = self.storage.local_path()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with hold_lock(folder / LOCK, LOCK_SECONDS) as is_held:
            if not is_held:
                raise FleetError(
                    f"fleet {self.name} is run by another process: `dtrain status {self.name}` shows it, `dtrain "
                    f"cancel {self.name}` ends it"
                )
            yield

    def is_there(self) -> bool:
        """Return whether there is a fleet of this name."""
        return self.storage.exists(FLEET)

    def is_run(self) -> bool:
        """Return whether a process runs the fleet now."""
        path = self.storage.local_path(LOCK)
        if not path.exists():
            return False
        with hold_lock(path, 0.0) as is_held:
            return not is_held

    def began_at(self, now: float) -> float:
        """Return the Unix time at which the fleet was begun; ``now`` for one that is not yet."""
        return float((self._read(FLEET) or {}).get("began_at", now))

    def write_limits(self, limits: FleetLimits, now: float) -> None:
        """Set the limits of the fleet, which begins now if it has not yet. Raise `FleetError` for a budget below what
        its jobs were promised."""
        promised = sum(entry.kept.grant_units for entry in self.entries())
        if promised > limits.budget_units:
            raise FleetError(
                f"budget_usd is {limits.budget_usd:g}, but jobs of fleet {self.name} have been paid or promised more "
                "already: give at least as much as before, or end jobs first"
            )
        self._write(FLEET, {"name": self.name, "began_at": self.began_at(now), "limits": asdict(limits)})

    def limits(self) -> FleetLimits:
        """Return the limits of the fleet. Raise `FleetError` where there is no such fleet."""
        found = self._read(FLEET)
        if found is None:
            raise FleetError(f"there is no fleet {self.name!r} in {self.storage.uri.rpartition('/')[0]}")
        return self._valid(FleetLimits, found.get("limits"), FLEET)

    def add(self, job: FleetJob, number: int) -> Entry:
        """Remember a job that the source gave."""
        order = job.order
        document = {
            "number": number,
            "job": {field.name: getattr(job, field.name) for field in fields(FleetJob) if field.name != "order"},
            "order": order and {"job": json.loads(order.job.to_json()), "command": order.command},
        }
        self._write(f"{JOBS}/{job.job_id}.json", document)
        return Entry(number=number, job=job, kept=self.kept(job.job_id))

    def entries(self) -> list[Entry]:
        """Return all jobs, in the order in which the source gave them."""
        found = []
        for file in self.storage.list(JOBS):
            data = self._read(f"{JOBS}/{file}")
            assert data is not None
            job = self._valid(FleetJob, data.get("job"), f"{JOBS}/{file}")
            if order := data.get("order"):
                place = f"{self.storage.uri}/{JOBS}/{file}"
                config = parse_job(json.dumps(order["job"]), source=place, is_stored=True)
                command = order["command"]
                job = replace(job, order=JobOrder(job=config, command=tuple(command) if command else None))
            found.append(Entry(number=int(data["number"]), job=job, kept=self.kept(job.job_id)))
        return sorted(found, key=lambda entry: entry.number)

    def kept(self, job_id: str) -> KeptState:
        """Return how a job stands."""
        name = f"{STATES}/{job_id}.json"
        found = self._read(name)
        return KeptState() if found is None else self._valid(KeptState, found, name)

    def keep(self, entry: Entry, kept: KeptState) -> Entry:
        """Remember how a job stands now, and return it so."""
        self._write(f"{STATES}/{entry.job.job_id}.json", asdict(kept))
        return replace(entry, kept=kept)

    def note_source(self, may_give_more: bool) -> None:
        """Remember whether the source may give more jobs."""
        if may_give_more != self.may_give_more():
            self._write(SOURCE, {"may_give_more": may_give_more})

    def may_give_more(self) -> bool:
        """Return whether the source may give more jobs, as far as it was asked."""
        return bool((self._read(SOURCE) or {}).get("may_give_more", False))

    def note_waits(self, waits: Mapping[str, str]) -> None:
        """Remember by job why it waits, for people."""
        if waits != self.waits():
            self._write(WAITS, waits)

    def waits(self) -> dict[str, str]:
        """Return by job why it waited when its fleet was looked at last."""
        return self._read(WAITS) or {}

    def ask_to_cancel(self) -> None:
        """Request the end of the fleet from whoever runs it."""
        self._write(CANCEL, {"asked_at": time.time()})

    def is_cancelled(self) -> bool:
        """Return whether somebody wants the fleet to end."""
        return self.storage.exists(CANCEL)

    def forget_cancellation(self) -> None:
        """Go on with a fleet that was cancelled."""
        self.storage.delete(CANCEL)

    def _write(self, name: str, document: Mapping[str, Any]) -> None:
        self.storage.write(name, json.dumps(document, indent=1, allow_nan=False).encode())

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            found = json.loads(self.storage.read(name))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise self._damage(name, str(error)) from None
        if not isinstance(found, dict):
            raise self._damage(name, "it is not an object")
        return found

    def _valid(self, kind: type[Any], document: Any, name: str) -> Any:
        try:
            return _adapter(kind).validate_python(document)  # type: ignore[arg-type]  # a class can be hashed
        except (ValidationError, FleetError) as error:
            raise self._damage(name, str(error)) from None

    def _damage(self, name: str, fault: str) -> DamagedError:
        remedy = f"end its jobs with `dtrain cancel`, and remove {self.storage.uri} to begin again"
        return DamagedError(f"{self.storage.uri}/{name}", fault, remedy)


def fleet_names(home: Path) -> list[str]:
    """Return the names of the fleets of this home."""
    storage = open_storage(str(Path(home) / FOLDER))
    return [name for name in storage.list() if storage.exists(f"{name}/{FLEET}")]


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
