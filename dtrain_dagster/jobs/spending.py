"""What the jobs of a home have spent this month and may still spend, held against its ceiling.

``<home>/spending/book.json`` has a `Promise` of each start: what a job, fleet or search is expected to cost, and once
a job has ended what was paid for it, so that its run directory is not read again. What was paid is computed from
the presence of nodes, as bills are. It is gathered, judged and promised under one lock: of two starts at the same
moment, the second sees the promise of the first. What is refused is decided in `dtrain_dagster.costs.ceilings`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.costs.ceilings import COMMAND, CeilingError, Spending, Stand, month_of, read_ceiling, stand_of
from dtrain_dagster.costs.money import HOUR, SECOND, nano_usd, units_of_usd
from dtrain_dagster.costs.plan import PLAN
from dtrain_dagster.costs.prices import PriceError, price_of
from dtrain_dagster.costs.tracker import CostTracker, NodeCost
from dtrain_dagster.jobs.totals import launched_usage
from dtrain_dagster.settings.cluster_kinds import Tier, tier_of
from dtrain_dagster.support.job_lock import is_held
from trainer.documents.places import ID
from trainer.documents.presences import NodePresence, stale_seconds
from trainer.errors import DamagedError
from trainer.rundir import LAUNCH, LIMIT, STATUS, RunDir
from trainer.storage.open import open_storage

FOLDER, BOOK, LOCK = "spending", "book.json", ".lock"
ASIDE = "book.damaged.json"
"""A book that could not be read, where no ceiling is set."""
GROUP = "group~"
"""The beginning of the names of promises of fleets and searches, which no job's id can have."""
Units = Annotated[int, Field(ge=0)]
"""A whole number of the units of `dtrain_dagster.costs.money`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """What is known of a job's money, besides its run directory."""

    part_of: str = ""
    """The fleet or search whose promise covers it."""
    units: Units | None = None
    """What it may cost in all; None: not known."""
    hourly: Units = 0
    """What its nodes cost in an hour: it is promised that where no estimate is known."""
    holder: float | None = None
    """The start of the process that has begun it, whose number is ``pid``: while it lives, the promise counts."""
    pid: int = 0
    paid: dict[str, Units] | None = None
    """Month → units that were paid; None as long as that may change."""
    noted_at: float = 0.0
    """When a command or a run has begun it, or gone on with it."""

    @property
    def is_held(self) -> bool:
        """Return whether the process that made it lives."""
        import psutil  # not above: loading the code location does without

        with suppress(psutil.Error):
            return self.holder is not None and abs(psutil.Process(self.pid).create_time() - self.holder) < 1.0
        return False


_log = logging.getLogger(__name__)
Book = dict[str, Promise]
"""The promises of a home, by their names."""
_BOOK = TypeAdapter(Book)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A start, as far as money is concerned."""

    name: str
    usd: float | None = None
    """What it may cost in all: its hard budget, else what is expected; None: not known."""
    usd_per_hour: float = 0.0
    """What all of its nodes cost in an hour, which counts where that is not known."""
    is_group: bool = False
    """Whether it is a fleet or a search, whose jobs are covered by it."""

    @property
    def key(self) -> str:
        """Return the name of its promise."""
        return f"{GROUP}{self.name}" if self.is_group else self.name

    @property
    def hourly(self) -> int:
        """Return what its nodes cost in an hour, in units."""
        return units_of_usd(self.usd_per_hour)

    @property
    def units(self) -> int:
        """Return what it may cost in all, in units; an hour of its nodes where that is not known."""
        return self.hourly if self.usd is None else units_of_usd(self.usd)


@contextmanager
def open_book(home: Path) -> Iterator[Book]:
    """Yield the promises of a home, under its one lock; what the block changes in them is written at its end. Where
    they cannot be read, raise `CeilingError`; without a ceiling, set them aside and begin anew."""
    folder = Path(home) / FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            book = _read(folder)
        except CeilingError as error:
            if read_ceiling(home) is not None:
                raise CeilingError(
                    f"{error}, so nothing is started; remove the file, and it is made again from the jobs' own records"
                ) from None
            (folder / BOOK).replace(folder / ASIDE)
            _log.warning("%s; without a ceiling it was set aside as %s, and another is begun", error, ASIDE)
            book = {}
        before = dict(book)
        yield book
        if book != before:  # in short: there are thousands of jobs
            open_storage(str(folder)).write(BOOK, _BOOK.dump_json(book, exclude_defaults=True))
    finally:
        os.close(descriptor)


def _read(folder: Path) -> Book:
    try:
        return _BOOK.validate_json((folder / BOOK).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise CeilingError(f"what was promised to jobs cannot be read in {folder / BOOK}: {why}") from None


def note_start(home: Path, job_id: str, part_of: str = "") -> None:
    """Note that a job is begun or gone on with, so that it is read again. ``part_of``: whose promise covers it."""
    with open_book(home) as book:
        book[job_id] = replace(book.get(job_id, Promise()), paid=None, part_of=part_of, noted_at=time.time())


def note_attached(home: Path, job_id: str) -> None:
    """Note that a job that runs already is gone on with. Its promise stays as it is; where the book cannot be read,
    nothing is noted."""
    with suppress(CeilingError), open_book(home) as book:
        book[job_id] = replace(book.get(job_id, Promise()), noted_at=time.time())


def jobs_noted_since(home: Path, since: float) -> list[str]:
    """Return the jobs that were begun or gone on with since then (Unix seconds), in the order of these; none where the
    book cannot be read."""
    book: Book = {}
    with suppress(CeilingError):
        book = _read(Path(home) / FOLDER)
    noted = sorted((promise.noted_at, name) for name, promise in book.items() if not name.startswith(GROUP))
    return [name for at, name in noted if at >= since]


class SpendingBook:
    """The promises of a home, and the run directories of its jobs."""

    def __init__(self, home: Path, jobs_uri: str, tier: Tier = "dedicated") -> None:
        """``tier``: of launches that do not name theirs."""
        self.home, self.jobs_uri, self.tier = Path(home), jobs_uri, tier

    def judge(self, wanted: Wanted | None = None, now: float | None = None) -> Stand | None:
        """Return how much of the ceiling is used, with a start or without one. None without a ceiling: then nothing is
        read. Raise `CeilingError` where that cannot be told."""
        if (per_month := read_ceiling(self.home)) is None:
            return None
        with open_book(self.home) as book:
            return self._judge(book, per_month, wanted, time.time() if now is None else now)

    @contextmanager
    def promised(self, wanted: Wanted) -> Iterator[Stand | None]:
        """Make the promise of a start, which counts for the block, and yield how much of the ceiling is used with it;
        None without a ceiling. Raise `CeilingError`, and promise nothing, where it would be exceeded. Where the block
        raises and no launch of it is there, the promise is taken back."""
        import psutil  # not above: loading the code location does without

        per_month, me = read_ceiling(self.home), psutil.Process()
        with open_book(self.home) as book:
            stand = None if per_month is None else self._judge(book, per_month, wanted, time.time())
            if stand is not None and (refusal := stand.refusal):
                raise CeilingError(refusal)
            before = book.get(wanted.key)
            book[wanted.key] = Promise(
                units=None if wanted.usd is None else wanted.units,
                hourly=wanted.hourly,
                holder=me.create_time(),
                pid=me.pid,
                noted_at=time.time(),
            )
        is_begun = False
        try:
            yield stand
            is_begun = True
        finally:
            is_begun = is_begun or (not wanted.is_group and self._rundir(wanted.name).storage.exists(LAUNCH))
            with (
                suppress(CeilingError, OSError),
                open_book(self.home) as book,
            ):  # if it is damaged, the next start says so
                promise = book.pop(wanted.key, None)
                if is_begun and promise is not None:
                    book[wanted.key] = replace(promise, holder=None, pid=0)
                elif not is_begun and before is not None:
                    book[wanted.key] = before

    # ---

    def _judge(self, book: Book, per_month: Decimal, wanted: Wanted | None, now: float) -> Stand:
        found, item = self._gather(book, now), None
        if wanted is not None:
            paid = 0 if wanted.usd is None else self._paid_before(book, wanted, now)
            item = Spending(name=_shown(wanted.key), promised_units=max(0, wanted.units - paid))
        return stand_of(per_month, month_of(now)[0], found, item)

    def _gather(self, book: Book, now: float) -> list[Spending]:
        """Return what each job of the home, and each fleet and search that is run, has spent and may still spend. What
        was paid for jobs that have ended is kept in the book."""
        try:
            jobs = [name for name in open_storage(self.jobs_uri).list() if ID.fullmatch(name)]
        except OSError as error:
            raise CeilingError(
                f"the jobs in {self.jobs_uri} cannot be listed, so what was spent is not known, and nothing is "
                f"started: {error}"
            ) from None
        looked: dict[str, _Looked] = {}
        for name in jobs:
            promise = book.get(name, Promise())
            if promise.paid is None:
                looked[name] = self._look(name, promise, now)
        # Of the others nothing was launched yet, they have ended, or their folders are gone.
        looked |= {name: _Looked(promise, promise.is_held) for name, promise in book.items() if name not in looked}
        book |= {name: item.promise for name, item in looked.items() if item.promise.paid is not None}
        return list(_add_up(looked, month_of(now)[0]))

    def _look(self, job_id: str, promise: Promise, now: float) -> _Looked:
        """Return what one job has cost and may still cost. Raise `CeilingError` where its records cannot be read."""
        rundir = self._rundir(job_id)
        try:
            launch = rundir.read_json(LAUNCH)
            if launch is None:
                return _Looked(promise, promise.is_held)
            status, plan, limit = rundir.read_json(STATUS), rundir.read_json(PLAN) or {}, rundir.read_json(LIMIT) or {}
            nodes, stale = rundir.nodes(), stale_seconds(rundir.storage)
        except NotADirectoryError:  # something that is no job
            return _Looked(promise, False)
        except (DamagedError, OSError) as error:
            raise CeilingError(
                f"what job {job_id} has cost cannot be read, so nothing is started: {error}; repair or remove its "
                f"folder, or lift the ceiling: {COMMAND} --none"
            ) from None
        is_open = promise.is_held or _is_open(rundir, launch, status)
        sku, tier = str(launch.get("sku", "")), tier_of(str(launch.get("tier") or plan.get("tier") or self.tier))
        try:
            tracker = CostTracker("", launched_usage(nodes, launch, is_open, now, stale), tier)
            each = nano_usd(price_of(sku).usd_per_hour(tier)) * HOUR
        except PriceError as error:
            return _Looked(promise, is_open, unknown=f"{error}")
        paid = paid_by_month(tracker.nodes)
        if not is_open and all(node.ended_at is not None for node in nodes):
            return _Looked(Promise(part_of=promise.part_of, paid=paid, noted_at=promise.noted_at), False)
        hourly = each * int(launch.get("node_count") or 0)
        return _Looked(promise, is_open, paid, _promised(promise, limit, plan, nodes, sum(paid.values()), each, hourly))

    def _paid_before(self, book: Book, wanted: Wanted, now: float) -> int:
        """Return what a job that is continued has cost so far, or a fleet's jobs have."""
        mine = {wanted.name: book.get(wanted.name, Promise())}
        if wanted.is_group:
            mine = {name: promise for name, promise in book.items() if promise.part_of == wanted.name}
        looked = (
            _Looked(promise, False) if promise.paid is not None else self._look(name, promise, now)
            for name, promise in mine.items()
        )
        return sum(sum(item.by_month.values()) for item in looked)

    def _rundir(self, job_id: str) -> RunDir:
        return RunDir(f"{self.jobs_uri}/{job_id}")


@dataclass(frozen=True, slots=True)
class _Looked:
    """One job or group, as it was seen."""

    promise: Promise
    is_open: bool
    """Whether it may go on to cost money."""
    paid: Mapping[str, int] = field(default_factory=dict)
    whole: int | None = None
    """What it may cost in all, where its run directory says."""
    unknown: str = ""

    @property
    def by_month(self) -> Mapping[str, int]:
        """Return month → units that were paid."""
        return self.paid or self.promise.paid or {}


def _shown(key: str) -> str:
    """Return the name of a job or a group for people; no job has that of a group."""
    return f"all of {key.removeprefix(GROUP)}" if key.startswith(GROUP) else key


def _add_up(looked: Mapping[str, _Looked], month: str) -> Iterator[Spending]:
    """Yield the spending of each; the jobs of a group that is open are covered by its promise."""
    spent = {key: sum(item.by_month.values()) for key, item in looked.items()}
    running: set[str] = set()
    for key, item in looked.items():
        if group := item.promise.part_of and f"{GROUP}{item.promise.part_of}":
            if group in spent:
                spent[group] += spent[key]
            if item.is_open:
                running.add(group)
    for key, item in looked.items():
        promise = item.promise
        is_covered = bool(promise.part_of) and f"{GROUP}{promise.part_of}" in looked
        counts = (item.is_open or key in running) and not is_covered
        whole = item.whole if item.whole is not None else promise.hourly if promise.units is None else promise.units
        yield Spending(
            name=_shown(key),
            month_units=item.by_month.get(month, 0),
            promised_units=max(0, whole - spent[key]) if counts else 0,
            unknown=item.unknown,
        )


def _promised(
    promise: Promise,
    limit: Mapping[str, Any],
    plan: Mapping[str, Any],
    nodes: Sequence[NodePresence],
    paid: int,
    each: int,
    hourly: int,
) -> int:
    """Return what a job that runs may cost in all: its budget, its estimate, or an hour more of its nodes. ``each``,
    ``hourly``: units of one node and of all in an hour. Pure."""
    if (most := limit.get("max_node_seconds")) is not None:
        seconds = sum(node.seconds(node.last_seen_at or node.started_at) for node in nodes)
        return paid + round(max(0.0, float(most) - seconds) * SECOND) * (each // HOUR)
    if promise.units is not None:
        return promise.units
    expected = ((plan.get("estimate") or {}).get("usd") or {}).get("expected")
    return paid + hourly if expected is None else units_of_usd(float(expected))


def paid_by_month(intervals: tuple[NodeCost, ...]) -> dict[str, int]:
    """Return calendar month (UTC) → what was paid for nodes in it, in units. Pure."""
    found: dict[str, int] = defaultdict(int)
    for interval in intervals:
        began = interval.began
        while began < interval.ended:
            month, first = month_of(began / SECOND)
            _, after = month_of(first + 32 * 86400.0)
            ended = min(interval.ended, round(after * SECOND))
            found[month] += (ended - began) * interval.nano_usd_per_hour
            began = ended
    return dict(found)


def _is_open(rundir: RunDir, launch: Mapping[str, Any], status: Mapping[str, Any] | None) -> bool:
    """Return whether a job may go on to cost money; on this machine, whether somebody looks after it."""
    if launch.get("engine") == "local":
        return is_held(rundir.storage.local_path())
    if status is None:
        return True
    of_launch = status.get("launch") in (None, launch.get("launch"))
    return not (of_launch and JobState(status.get("state", JobState.QUEUED)).is_final)
