"""What a fleet remembers: ``<home>/fleets/<name>``, one document per fact, each written completely or not at all.

    fleet.json              its limits
    jobs/<job_id>.json      a job as its source gave it, and its order; written before anything of it is bought
    states/<job_id>.json    how it stands: its state, nodes, grant and bill
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
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dtrain_dagster.fleet.jobs import FleetError, FleetJob, FleetLimits, Standing
from trainer.config import parse_job
from trainer.documents.places import PlaceError, checked_id
from trainer.errors import DamagedError
from trainer.runtime.file_lock import hold_lock
from trainer.storage.open import open_storage

FOLDER = "fleets"
FLEET, JOBS, STATES = "fleet.json", "jobs", "states"
CANCEL = "cancel.json"
LOCK = "orchestrator.lock"
LOCK_SECONDS = 2.0
"""Seconds that a second orchestrator waits before it is refused."""


ORDER = ("config", "command")
"""Fields of a job that are kept as its order."""
OWN = [item.name for item in fields(Standing) if item.name not in ("job", "number")]
"""What changes of a standing: it has a document of its own."""


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
        promised = sum(standing.grant_units for standing in self.standings())
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

    def add(self, job: FleetJob, number: int) -> Standing:
        """Remember a job that the source gave."""
        config = job.config
        document = {
            "number": number,
            "job": {item.name: getattr(job, item.name) for item in fields(FleetJob) if item.name not in ORDER},
            "order": config and {"job": json.loads(config.to_json()), "command": job.command},
        }
        self._write(f"{JOBS}/{job.job_id}.json", document)
        return self._standing(job, number)

    def standings(self) -> list[Standing]:
        """Return how all jobs stand, in the order in which the source gave them."""
        found = []
        for file in self.storage.list(JOBS):
            name = f"{JOBS}/{file}"
            data = self._read(name)
            assert data is not None
            if "least_nodes" in data.get("job", {}):
                raise FleetError(
                    f"fleet {self.name} was begun by an older version, which chose the nodes of its jobs: end it with "
                    "that version, or begin it again under another name"
                )
            job = self._valid(FleetJob, data.get("job"), name)
            if order := data.get("order"):
                text, place = json.dumps(order["job"]), f"{self.storage.uri}/{name}"
                config, command = parse_job(text, source=place, is_stored=True), order["command"]
                job = replace(job, config=config, command=tuple(command) if command else None)
            found.append(self._standing(job, int(data["number"])))
        return sorted(found, key=lambda standing: standing.number)

    def _standing(self, job: FleetJob, number: int) -> Standing:
        name = f"{STATES}/{job.job_id}.json"
        return self._valid(Standing, {"job": job, "number": number, **(self._read(name) or {})}, name)

    def keep(self, standing: Standing) -> None:
        """Remember how a job stands now."""
        self._write(f"{STATES}/{standing.job_id}.json", {name: getattr(standing, name) for name in OWN})

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
