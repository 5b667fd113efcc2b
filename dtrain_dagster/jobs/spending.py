"""What the jobs of a home have spent this month and may still spend, held against its ceilings.

What was paid is computed from the presence of nodes, as bills are. It is gathered, judged and promised under one lock:
of two starts at the same moment, the second sees the promise of the first (`dtrain_dagster.jobs.promises`). What is a
ceiling, and what it refuses, is decided in `dtrain_dagster.costs.ceilings`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.costs.ceilings import (
    COMMAND,
    CeilingError,
    Ceilings,
    Spending,
    Stand,
    explain_excess,
    month_of,
    read_ceilings,
    stands_of,
)
from dtrain_dagster.costs.money import HOUR, SECOND, nano_usd, units_of_usd
from dtrain_dagster.costs.plan import PLAN
from dtrain_dagster.costs.prices import PriceError, price_of
from dtrain_dagster.costs.tracker import CostTracker, NodeCost
from dtrain_dagster.jobs.promises import (
    GROUP,
    Promise,
    PromiseFiles,
    Wanted,
    name_of,
    shown_name,
    this_process,
)
from dtrain_dagster.jobs.totals import launched_usage
from dtrain_dagster.settings.tiers import Tier, tier_of
from dtrain_dagster.support.job_lock import is_held
from trainer.documents.places import ID
from trainer.documents.presences import NodePresence, stale_seconds
from trainer.errors import DamagedError
from trainer.rundir import LAUNCH, LIMIT, STATUS, RunDir
from trainer.storage.open import open_storage

NOBODY = Promise(person="unknown", project="unknown")
"""The promise of a job that was started without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """How the ceilings of a home stand, with a start or without one."""

    ceilings: Ceilings
    stands: tuple[Stand, ...] = ()
    spending: tuple[Spending, ...] = ()
    month: str = ""

    @property
    def refusal(self) -> str | None:
        """Return why the start is refused; None where no ceiling is exceeded."""
        return explain_excess(self.stands, self.spending, self.month)


class SpendingBook:
    """The promises of a home, and the run directories of its jobs."""

    def __init__(self, home: Path, jobs_uri: str, tier: Tier = "dedicated") -> None:
        """``tier``: of launches that do not name theirs."""
        self.home, self.jobs_uri, self.tier = Path(home), jobs_uri, tier
        self.files = PromiseFiles(self.home)

    def judge(self, wanted: Wanted | None = None, now: float | None = None) -> Judged:
        """Return how the ceilings stand, with a start or without one. Without ceilings nothing is read. Raise
        `CeilingError` where that cannot be told."""
        ceilings = read_ceilings(self.home)
        if not ceilings:
            return Judged(ceilings=ceilings)
        with self.files.locked():
            return self._judge(ceilings, wanted, time.time() if now is None else now)

    @contextmanager
    def promised(self, wanted: Wanted) -> Iterator[Judged]:
        """Make the promise of a start, and yield how the ceilings stand with it. Raise `CeilingError`, and promise
        nothing, where one would be exceeded. Where the block raises and no launch of it is there, the promise is taken
        back; that of a fleet or a search is held for the block."""
        ceilings, now = read_ceilings(self.home), time.time()
        with self.files.locked():
            judged = self._judge(ceilings, wanted, now) if ceilings else Judged(ceilings=ceilings)
            if refusal := judged.refusal:
                raise CeilingError(refusal)
            started_at, pid = this_process()
            promise = Promise(
                person=wanted.owner.person,
                project=wanted.owner.project,
                units="" if wanted.usd is None else str(wanted.units),
                hourly=str(wanted.hourly),
                holder=started_at,
                pid=pid,
                before=0 if wanted.is_group else self._launch_number(wanted.name),
            )
            before = self.files.try_to_read(name_of(wanted))
            self.files.write(name_of(wanted), promise)
        try:
            yield judged
        except BaseException:
            with self.files.locked():
                if wanted.is_group or not self._rundir(wanted.name).storage.exists(LAUNCH):
                    self.files.write(name_of(wanted), before)
            raise
        if wanted.is_group:
            with self.files.locked():
                self.files.write(name_of(wanted), replace(promise, holder=None, pid=0))

    # ---

    def _judge(self, ceilings: Ceilings, wanted: Wanted | None, now: float) -> Judged:
        month, _ = month_of(now)
        found = self._gather(now)
        item = None
        if wanted is not None:
            paid = 0 if wanted.usd is None else self._paid_before(wanted)
            item = Spending(
                name=shown_name(name_of(wanted)),
                person=wanted.owner.person,
                project=wanted.owner.project,
                promised_units=max(0, wanted.units - paid),
                hourly_units=wanted.hourly,
            )
        return Judged(
            ceilings=ceilings, stands=tuple(stands_of(ceilings, found, item)), spending=tuple(found), month=month
        )

    def _gather(self, now: float) -> list[Spending]:
        """Return what each job of the home, and each fleet and search that is run, has spent and may still spend."""
        promises = self.files.all()
        try:
            jobs = [name for name in open_storage(self.jobs_uri).list() if ID.fullmatch(name)]
        except OSError as error:
            raise CeilingError(
                f"the jobs in {self.jobs_uri} cannot be listed, so what was spent is not known, and nothing is "
                f"started: {error}"
            ) from None
        ended = {name for name, promise in promises.items() if promise.paid is not None}
        looked = {name: self._look(name, promises.get(name), now) for name in jobs if name not in ended}
        for name in promises.keys() - looked.keys():  # nothing of it was launched yet, or its folder is gone
            looked[name] = _Looked(promise=promises[name], is_open=promises[name].is_held)
        return list(_add_up(looked, month_of(now)[0]))

    def _look(self, job_id: str, promise: Promise | None, now: float) -> _Looked:
        """Return what one job has cost and may still cost. Raise `CeilingError` where its records cannot be read."""
        rundir = self._rundir(job_id)
        try:
            launch = rundir.read_json(LAUNCH)
            if launch is None:
                held = promise or NOBODY
                return _Looked(promise=held, is_open=held.is_held)
            status, plan, limit = rundir.read_json(STATUS), rundir.read_json(PLAN) or {}, rundir.read_json(LIMIT) or {}
            nodes, stale = rundir.nodes(), stale_seconds(rundir.storage)
        except NotADirectoryError:  # something that is no job
            return _Looked(promise=NOBODY)
        except (DamagedError, OSError) as error:
            raise CeilingError(
                f"what job {job_id} has cost cannot be read, so nothing is started: {error}; repair or remove its "
                f"folder, or lift the ceilings: {COMMAND} --none"
            ) from None
        promise = promise or NOBODY
        is_open = _is_open(rundir, launch, status) or (promise.is_held and launch.get("launch", 0) <= promise.before)
        sku, tier = str(launch.get("sku", "")), tier_of(str(launch.get("tier") or plan.get("tier") or self.tier))
        try:
            tracker = CostTracker("", launched_usage(nodes, launch, is_open, now, stale), tier)
            hourly = nano_usd(price_of(sku).usd_per_hour(tier)) * HOUR * int(launch.get("node_count") or 0)
        except PriceError as error:
            return _Looked(promise=promise, is_open=is_open, unknown=f"{error}")
        paid = paid_by_month(tracker.nodes)
        if not is_open and all(node.ended_at is not None for node in nodes):
            kept = Promise(
                person=promise.person,
                project=promise.project,
                part_of=promise.part_of,
                paid={month: str(units) for month, units in paid.items()},
            )
            self.files.settle(job_id, kept)
            return _Looked(promise=kept)
        return _Looked(
            promise=promise,
            is_open=is_open,
            paid=paid,
            hourly=hourly,
            units=_promised(
                promise, limit, plan, nodes, sum(paid.values()), hourly, int(launch.get("node_count") or 1)
            ),
        )

    def _paid_before(self, wanted: Wanted) -> int:
        """Return what a job that is continued has cost so far, or a fleet's jobs have."""
        now = time.time()
        if not wanted.is_group:
            looked = self._look(wanted.name, self.files.read(wanted.name), now)
            return sum((looked.paid or _units_by_month(looked.promise)).values())
        total = 0
        for name, promise in self.files.all().items():
            if promise.part_of == wanted.name:
                paid = self._look(name, promise, now).paid if promise.paid is None else {}
                total += sum((paid or _units_by_month(promise)).values())
        return total

    def _rundir(self, job_id: str) -> RunDir:
        return RunDir(f"{self.jobs_uri}/{job_id}")

    def _launch_number(self, job_id: str) -> int:
        with suppress(DamagedError):  # told where it counts
            return int((self._rundir(job_id).read_json(LAUNCH) or {}).get("launch") or 0)
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Looked:
    """One job or group, as it was seen."""

    promise: Promise
    is_open: bool = False
    """Whether it may go on to cost money."""
    paid: Mapping[str, int] = field(default_factory=dict)
    hourly: int = 0
    units: int | None = None
    """What it may cost in all, where its run directory says."""
    unknown: str = ""


def _add_up(looked: Mapping[str, _Looked], month: str) -> Iterator[Spending]:
    """Yield the spending of each; the jobs of a group that is open are covered by its promise."""
    paid = {name: dict(item.paid) or _units_by_month(item.promise) for name, item in looked.items()}
    of_group: dict[str, int] = defaultdict(int)
    running: set[str] = set()
    for name, item in looked.items():
        if item.promise.part_of:
            of_group[item.promise.part_of] += sum(paid[name].values())
            if item.is_open:
                running.add(item.promise.part_of)
    for name, item in looked.items():
        promise, group = item.promise, name.removeprefix(GROUP) if name.startswith(GROUP) else ""
        is_open = item.is_open or group in running if group else item.is_open
        is_covered = bool(promise.part_of) and f"{GROUP}{promise.part_of}" in looked
        whole = item.units if item.units is not None else int(promise.units or promise.hourly)
        spent = of_group[group] if group else sum(paid[name].values())
        counts = is_open and not is_covered
        yield Spending(
            name=shown_name(name),
            person=promise.person,
            project=promise.project,
            month_units=paid[name].get(month, 0),
            promised_units=max(0, whole - spent) if counts else 0,
            hourly_units=(item.hourly or int(promise.hourly)) if counts else 0,
            unknown=item.unknown,
        )


def _units_by_month(promise: Promise) -> dict[str, int]:
    return {month: int(units) for month, units in (promise.paid or {}).items()}


def _promised(
    promise: Promise,
    limit: Mapping[str, Any],
    plan: Mapping[str, Any],
    nodes: Sequence[NodePresence],
    paid: int,
    hourly: int,
    count: int,
) -> int:
    """Return what a job that runs may cost in all: its budget, its estimate, or an hour more of its nodes. Pure."""
    most, each = limit.get("max_node_seconds"), hourly // max(1, count)
    if most is not None:
        seconds = sum(node.seconds(node.last_seen_at or node.started_at) for node in nodes)
        return paid + round(max(0.0, float(most) - seconds) * SECOND) * (each // HOUR)
    if promise.units:
        return int(promise.units)
    expected = ((plan.get("estimate") or {}).get("usd") or {}).get("expected")
    if expected is not None:
        return units_of_usd(float(expected))
    return paid + hourly


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
