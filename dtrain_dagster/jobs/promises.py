"""The promise that each start of a job makes: ``<home>/spending/<job_id>.json``, or ``group~<name>.json`` of a fleet or
a search.

It says whose the job is, and what it is expected to cost. Those of jobs that have ended are in one file,
``~ended.json``, with what was paid for each in each month, so that their run directories are not read again. What
follows from all of them is gathered in `dtrain_dagster.jobs.spending`.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from dtrain_dagster.costs.ceilings import CeilingError
from dtrain_dagster.costs.money import units_of_usd
from trainer.documents.reader import read_document
from trainer.documents.schemas import Check, make, mapping, matching, record_of
from trainer.errors import DamagedError
from trainer.storage.open import open_storage

FOLDER = "spending"
WORKED_ON = "worked-on"
"""The folder of empty files, one for each job that a command has begun or gone on with, which stay at its end."""
LOCK, ENDED = ".lock", "~ended.json"
GROUP = "group~"
"""The beginning of the names of promises of fleets and searches, which no job's id can have."""
PERSON_TAG = "dtrain/person"
"""The tag of a Dagster run that names the person whose it is; else it is the user of this machine."""
_WHOLE = matching(r"\d*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """Whose a job is."""

    person: str
    project: str
    """The MLflow experiment in which it is recorded (DTRAIN_EXPERIMENT)."""


def owner_here(experiment: str, tags: Mapping[str, str] | None = None) -> Owner:
    """Return whose the jobs are that this process starts. ``tags``: of the Dagster run that starts them."""
    person = (tags or {}).get(PERSON_TAG, "")
    with suppress(KeyError, OSError):  # a container's user without a name
        person = person or getpass.getuser()
    return Owner(person=person or f"user {os.getuid()}", project=experiment)


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """What is known of a job's money, besides its run directory."""

    person: str
    project: str
    part_of: str = ""
    """The fleet or search whose promise covers it."""
    units: Annotated[str, _WHOLE] = ""
    """What it may cost in all, as a whole number of the units of `dtrain_dagster.costs.money`; "": not known."""
    hourly: Annotated[str, _WHOLE] = "0"
    """What its nodes cost in an hour, in these units; a job of which no estimate is known is promised that."""
    holder: float | None = None
    """The start of the process that has begun it, whose number is ``pid``: while it lives, the promise counts."""
    pid: int = 0
    before: int = 0
    """The number of the launch that was there before."""
    paid: dict[str, Annotated[str, _WHOLE]] | None = None
    """Month → units that were paid; None as long as that may change."""

    @property
    def is_held(self) -> bool:
        """Return whether the process that made it lives."""
        import psutil  # not above: loading the code location does without

        with suppress(psutil.Error):
            return self.holder is not None and abs(psutil.Process(self.pid).create_time() - self.holder) < 1.0
        return False


_SCHEMA = record_of(Promise)
_ENDED = mapping(_SCHEMA)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A start, as far as money is concerned."""

    name: str
    owner: Owner
    usd: float | None = None
    """What it may cost in all: its hard budget, else what is expected; None: not known."""
    usd_per_hour: float = 0.0
    """What all of its nodes cost in an hour."""
    is_group: bool = False
    """Whether it is a fleet or a search, whose jobs are covered by it."""

    @property
    def hourly(self) -> int:
        """Return what its nodes cost in an hour, in units."""
        return units_of_usd(self.usd_per_hour)

    @property
    def units(self) -> int:
        """Return what it may cost in all, in units; an hour of its nodes where that is not known."""
        return self.hourly if self.usd is None else units_of_usd(self.usd)


def name_of(wanted: Wanted) -> str:
    """Return the name of a start's promise."""
    return f"{GROUP}{wanted.name}" if wanted.is_group else wanted.name


def shown_name(name: str) -> str:
    """Return the name of a job or a group for people; no job has that of a group."""
    return f"all of {name.removeprefix(GROUP)}" if name.startswith(GROUP) else name


def this_process() -> tuple[float, int]:
    """Return the start (Unix seconds) and the number of this process, by which a promise is held."""
    import psutil  # not above: loading the code location does without

    me = psutil.Process()
    return me.create_time(), me.pid


class PromiseFiles:
    """The promises of a home."""

    def __init__(self, home: Path) -> None:
        self.folder = Path(home) / FOLDER
        self.storage = open_storage(str(self.folder))
        self._settled: dict[str, Promise] = {}
        """What was settled while the lock is held, and is written at its end."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the one lock of a home's spending."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            self._settled = {}
            yield
            self._write_settled()
        finally:
            os.close(descriptor)

    def all(self) -> dict[str, Promise]:
        """Return all promises by their names. Raise as `read`."""
        names = [name.removesuffix(".json") for name in self.storage.list() if name.endswith(".json")]
        own = {name: self._read(name, _SCHEMA) for name in names if name != ENDED.removesuffix(".json")}
        return self._ended() | {name: make(Promise, found) for name, found in own.items() if found is not None}

    def read(self, name: str) -> Promise | None:
        """Return a promise; None where there is none. Raise `CeilingError` where it cannot be read."""
        found = self._read(name, _SCHEMA)
        return self._ended().get(name) if found is None else make(Promise, found)

    def _ended(self) -> dict[str, Promise]:
        found = self._read(ENDED.removesuffix(".json"), _ENDED) or {}
        return {name: make(Promise, each) for name, each in found.items()} | self._settled

    def _read(self, name: str, check: Check) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] | None = read_document(self.storage, f"{name}.json", check)
        except (DamagedError, OSError) as error:
            raise CeilingError(
                f"what was promised to {name} cannot be read, so nothing is started: {error}; remove the file, and it "
                "is made again from the job's own records"
            ) from None
        return found

    def try_to_read(self, name: str) -> Promise | None:
        """Return a promise that is about to be written again; None where it cannot be read."""
        with suppress(CeilingError):
            return self.read(name)
        return None

    def settle(self, name: str, promise: Promise) -> None:
        """Keep the promise of a job that has ended among those that are not looked at again."""
        self._settled[name] = promise

    def _write_settled(self) -> None:
        if self._settled:
            document = {name: _shortened(promise) for name, promise in self._ended().items()}
            self.storage.write(ENDED, json.dumps(document).encode())
            for name in self._settled:
                self.storage.delete(f"{name}.json")

    def write(self, name: str, promise: Promise | None) -> None:
        """Write a promise; None: remove it."""
        if promise is None:
            self.storage.delete(f"{name}.json")
        else:
            self.storage.write(f"{name}.json", json.dumps(asdict(promise)).encode())


def _shortened(promise: Promise) -> dict[str, Any]:
    """Return the fields that are not what they usually are: there are thousands of jobs."""
    usual = asdict(Promise(person="", project=""))
    needed = ("person", "project")
    return {name: value for name, value in asdict(promise).items() if name in needed or value != usual[name]}


def note_start(home: Path, job_id: str, owner: Owner, part_of: str = "") -> None:
    """Note that a job is about to be launched, so that it is read again. ``part_of``: whose promise covers it."""
    files = PromiseFiles(home)
    with files.locked():
        known = files.try_to_read(job_id) or Promise(person=owner.person, project=owner.project)
        files.write(job_id, replace(known, paid=None, part_of=part_of))
    note_work(home, job_id)


def note_work(home: Path, job_id: str) -> None:
    """Note that a command begins a job or goes on with it, so that `jobs_begun_since` lists it."""
    folder = Path(home) / FOLDER
    for each in (folder, folder / WORKED_ON):
        each.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / WORKED_ON / job_id).touch()


def jobs_begun_since(home: Path, since: float) -> list[str]:
    """Return the jobs that a command has begun or gone on with since then (Unix seconds), in the order of these."""
    found = sorted((path.stat().st_mtime, path.name) for path in (Path(home) / FOLDER / WORKED_ON).glob("*"))
    return [name for at, name in found if at >= since]
