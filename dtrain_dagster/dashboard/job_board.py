"""The jobs of a storage and the state of each, from run directories alone, wherever and by whom they were started."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, TypeVar

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.base import JobState, JobStatus
from dtrain_dagster.costs.plan import PLAN
from dtrain_dagster.costs.prices import PriceError
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.dashboard.failure import (
    changes_to_mark,
    end_in_words,
    missing_nodes,
    tell_losses,
)
from dtrain_dagster.dashboard.job_facts import JobAccount, Places, account_of, basis_of, facts_of_page, trackers_of
from dtrain_dagster.dashboard.job_index import SETTLED_SECONDS, JobIndex, Listing
from dtrain_dagster.dashboard.series import PerformanceDashboard
from dtrain_dagster.jobs.facts import JobFacts, add_paid, read_course, read_facts, status_here
from dtrain_dagster.jobs.view import UNREADABLE, JobView
from dtrain_dagster.planning.projection import TimeLeft, project, time_left
from dtrain_dagster.settings.cluster_kinds import Tier
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.config import JOB_ID
from trainer.documents.presences import NodePresence, stale_seconds
from trainer.errors import DamagedError
from trainer.printable import visible
from trainer.rundir import JOB, LAUNCH, RESULT, STATUS, RunDir, SeenFiles, flush_seconds
from trainer.secrets.redaction import redact
from trainer.storage.base import Storage
from trainer.storage.open import open_storage

RECENT_JOBS = 16
"""The most jobs under ``/metrics``."""
OPEN_JOBS = RECENT_JOBS + 8
"""The most jobs held in memory, as pages show others besides; the one that was looked at longest ago makes room."""
RECENT_SECONDS = 3600.0
SILENT_SECONDS = 60.0
"""The silence after which a training job counts as silent; it usually writes more often."""
ENDED = frozenset(state.value for state in JobState if state.is_final)
CANNOT_READ = (*UNREADABLE, OSError, RecursionError)
T = TypeVar("T")


class OpenJob:
    """A job that a page shows: its run directory, folded as far as it was written."""

    def __init__(self, rundir: RunDir, tier: Tier) -> None:
        self.rundir = rundir
        self.dashboard = PerformanceDashboard()
        self.row: JobFacts
        self.nodes: list[NodePresence] = []
        self.cost: tuple[float, str] | None = None
        """The dollars of its nodes and its probes so far, and what they rest on; None where no price is known."""
        self._tier = tier
        self._training: Mapping[str, Any] = {}
        self._plan: Mapping[str, Any] | None = None
        self._seen = SeenFiles()
        self._read_at = -1e9
        self._end: dict[str, Any] | None = None
        """The cluster's record of the end, once everything until then has been read."""
        self._made: dict[str, tuple[object, Any]] = {}
        """What all readers share: by its name, what it was made for, and it."""
        self.lock = threading.Lock()
        """The lock for reading several of the figures together, and for changing them."""
        self.looked_at = 0.0

    def refresh(self, now: float) -> OpenJob:
        """Read what was written since the last look, at most once in `refresh_seconds`; return this job."""
        with self.lock:
            self.looked_at = time.monotonic()
            if time.monotonic() - self._read_at < refresh_seconds(self.rundir.storage):
                return self
            status = self.rundir.read_json(STATUS) or {}  # asked first, so that the last round reads everything
            if self._end is not None and status == self._end:
                self._read_at = time.monotonic()
                return self
            self.row = read_facts(self.rundir, status_here(self.rundir), self._tier)
            events = self.rundir.follow(self._seen, is_live=status.get("state") not in ENDED)
            self.dashboard.take(events)
            self.nodes = [_without_secrets(node) for node in self.rundir.nodes()]
            self._training = self._training or (self.rundir.read_json(JOB) or {}).get("training", {})
            self._plan = self._plan or self.rundir.read_json(PLAN)
            self.cost = cost_so_far(self.rundir, self.nodes, self.row.running, self._tier, now, self.dashboard.view)
            self._end = status if status.get("state") in ENDED and not self._seen.is_behind else None
            self._read_at = time.monotonic()
            return self

    @property
    def is_behind(self) -> bool:
        """Whether more was written than was read: a long job is read in several looks."""
        return self._seen.is_behind

    def read_more(self) -> None:
        """Read the next part of the events at once."""
        with self.lock:
            self.dashboard.take(self.rundir.follow(self._seen))
            self._read_at = -1e9  # the next look may find that nothing is left

    def nodes_alive(self, now: float) -> int:
        """Return the number of nodes that are present, by their own records."""
        stale = stale_seconds(self.rundir.storage)
        return (
            sum(presences.is_here(presence, now, stale) for presence in presences.find_latest_presences(self.nodes))
            * self.row.running
        )

    def time_left(self, now: float) -> TimeLeft | None:
        """Return the time until the job ends; None where it is not known, and for a job that has ended."""
        return time_left(self.dashboard.view, self._plan, now) if self.row.running else None

    def snapshot(self, version: int, token: str, now: float) -> dict[str, Any]:
        """Return the page's data of this job: the tracks' rows after ``version``, and all small parts as a whole. The
        verdict on a job that has ended is that of its report: on the whole, and not on the latest steps."""
        account = None
        if not self.row.running and not self.is_behind:
            with suppress(*CANNOT_READ):  # then the verdict on its latest steps stays
                account = self.account(now)
        with self.lock:
            version_now = self.dashboard.version
            details = self._share("details", version_now, lambda: self.dashboard.details(self._training))
            changes, usd = tuple(self.dashboard.changes_of_nodes), account.lost_usd if account else None
            row, loss = self.row, tell_losses(changes, self.nodes, self.row.state, now, usd)
            return {
                **self.dashboard.changes(version, token),
                **details,
                **({"verdict": account.verdict} if account else {}),
                "is_whole": account is not None,
                "loss": redact(asdict(loss)) if loss else None,
                "changes": changes_to_mark(changes, self.row.state),
                "job": {"job_id": row.job_id, "state": row.state, "step": row.step, "ended_at": row.ended_at},
                "headline": headline(self, now),
                "presences": [asdict(presence) for presence in self.nodes],
                "now": now,
            }

    def account(self, now: float) -> JobAccount:
        """Return what the job's dollars bought, from all events: that of a running job is shared for a while."""
        with self.lock:
            return self._share(
                "account",
                self._moment(),
                lambda: account_of(self.rundir, self.nodes, self.row.state, self._tier, self._training, now),
            )

    def facts(self, places: Places) -> dict[str, Any]:
        """Return what the page says besides curves and costs, see `job_facts.facts_of_page`; shared for a while. After
        the end, too: storage may have failed for a moment, and a run in MLflow may be made later."""
        with self.lock:
            state, usd = self.row.state, self.cost[0] if self.cost else None
            made_for = (self._end is None, self._while, state, places)
            return self._share("facts", made_for, lambda: facts_of_page(self.rundir, state, usd, places))

    def _moment(self) -> object:
        """Return what changes now and then while the job runs, and once more when its end was read."""
        return self._end or self._while

    @property
    def _while(self) -> float:
        """Return what changes now and then."""
        return time.monotonic() // (10 * refresh_seconds(self.rundir.storage))

    def _share(self, name: str, made_for: object, make: Callable[[], T]) -> T:
        """Return what was made before for the same, or make it."""
        if name not in self._made or self._made[name][0] != made_for:
            self._made[name] = (made_for, make())
        found: T = self._made[name][1]
        return found


class JobBoard:
    """The board of all jobs in ``jobs_uri``. Safe for any number of threads."""

    def __init__(self, jobs_uri: str, tier: Tier) -> None:
        self.jobs_uri, self.tier = jobs_uri, tier
        self.storage = open_storage(jobs_uri)
        self._open: dict[str, OpenJob] = {}
        self._lock = threading.Lock()
        self._index = JobIndex(self.storage, self._row, 2 * refresh_seconds(self.storage))

    def jobs(self) -> Sequence[JobFacts]:
        """Return a row for every training, newest first. Raise OSError where storage cannot be listed."""
        return self.listing().rows

    def listing(self, most_seconds: float = math.inf) -> Listing:
        """Return all rows, and a version that changes with them, as `JobIndex.listing` does."""
        return self._index.listing(most_seconds)

    def open(self, job_id: str, now: float) -> OpenJob | None:
        """Return a job as it stands now; None where there is none. Raise one of `CANNOT_READ` if it is damaged."""
        if not JOB_ID.fullmatch(job_id):
            return None
        with self._lock:
            job = self._open.get(job_id)
            if job is None:
                rundir = RunDir(f"{self.jobs_uri}/{job_id}")
                if not rundir.storage.exists(JOB):
                    return None
                job = self._open[job_id] = OpenJob(rundir, self.tier)
                job.looked_at = time.monotonic()
            while len(self._open) > OPEN_JOBS:
                del self._open[min(self._open, key=lambda name: self._open[name].looked_at)]
        try:
            return job.refresh(now)
        except FileNotFoundError:  # deleted meanwhile
            with self._lock:
                if self._open.get(job_id) is job:
                    del self._open[job_id]
            return None

    def recent(self, now: float) -> list[OpenJob]:
        """Return the jobs that run or ended within the last hour, at most the newest `RECENT_JOBS`."""
        rows = [row for row in self.jobs() if row.running or (row.ended_at or 0.0) > now - RECENT_SECONDS]
        found = []
        for row in rows[:RECENT_JOBS]:
            with suppress(*CANNOT_READ):
                found.append(self.open(row.job_id, now))
        return [job for job in found if job is not None]

    def _row(self, name: str) -> tuple[JobFacts | None, float]:
        """Return the list's row of a folder, None where it is no training, and for how many seconds it stays as it is
        while its files keep their marks (see `JobIndex`)."""
        rundir = RunDir(f"{self.jobs_uri}/{name}")
        settled = math.inf if self.storage.is_local else SETTLED_SECONDS
        try:
            recorded = rundir.read_json(STATUS) or {}
            status = status_here(rundir)
        except FileNotFoundError:
            return None, settled
        except CANNOT_READ as error:
            why = visible(redact(str(error)))
            status = JobStatus(job_id=name, state=JobState.FAILED, damage=why)
            keeps_seconds = SETTLED_SECONDS if isinstance(error, DamagedError) else 0.0
            return JobFacts(status=status, words=why), keeps_seconds
        row = JobFacts(status=status)
        try:
            row = read_course(rundir, status)
            row = add_paid(row, rundir, self.tier)
            result, launch = rundir.read_json(RESULT) or {}, rundir.read_json(LAUNCH) or {}
            row = replace(row, words=end_in_words(row.state, recorded, result, launch))
        except CANNOT_READ as error:
            return replace(row, words=visible(redact(f"not all of it can be read: {error}"))), 0.0
        # A job with a cluster changes until that has recorded its end: a supervisor that is killed writes nothing.
        if rundir.storage.exists(LAUNCH) and recorded.get("state") not in ENDED:
            return row, 0.0
        return row, settled if self.storage.is_local or not row.running else 0.0


def _without_secrets(node: NodePresence) -> NodePresence:
    host, why, failed = map(redact, (node.host, node.leaves_because, node.preflight))
    return replace(node, host=host, leaves_because=why, preflight=failed)


def refresh_seconds(storage: Storage) -> float:
    """Return the seconds between two looks; on remote storage each look is paid for."""
    return 1.0 if storage.is_local else 10.0


def cost_so_far(
    rundir: RunDir, nodes: Sequence[NodePresence], running: bool, default_tier: Tier, now: float, view: JobView
) -> tuple[float, str] | None:
    """Return the dollars of a job's nodes and probes so far, and in words what they rest on and come to; None where the
    price is not known."""
    launch, plan = rundir.read_json(LAUNCH) or {}, rundir.read_json(PLAN) or {}
    try:
        tracker, whole = trackers_of(rundir, nodes, launch, plan, running, default_tier, now)
    except (PriceError, ValueError):
        return None
    probe_usd = whole.total_usd - tracker.total_usd
    of_probe = f"with {dollars(probe_usd)} of its probe; " if probe_usd else ""
    at_end = _at_end(tracker, probe_usd, plan, view) if running and plan else ""
    return whole.total_usd, f"{of_probe}{at_end}{basis_of(plan, launch)}"


def _at_end(tracker: CostTracker, probe_usd: float, plan: Mapping[str, Any], view: JobView) -> str:
    """Return the projection in words, with the dollars of probes, which are paid already."""
    try:
        projection = project(tracker, plan, view)
    except (KeyError, TypeError, ValueError, AttributeError):  # a plan of another version
        return ""
    if projection.at_end is None or projection.over_at_end is None:
        return ""
    usd = projection.at_end.expected + probe_usd
    return f"{dollars(usd)} at the end, {projection.over_at_end:+.0%} to the estimate; "


def headline(job: OpenJob, now: float) -> list[dict[str, str]]:
    """Return the figures at the top of the page: label, value, and a note under it."""
    board, row = job.dashboard, job.row
    view = board.view
    of = f"of {view.total_steps:,}, " if view.total_steps else ""
    silent, since = now - board.heard_at if board.heard_at and row.running else 0.0, row.status.started_at or now
    if row.running and not view.step:
        note = "waiting for the first step"
    elif silent > max(SILENT_SECONDS, 2 * flush_seconds(now - since, 0, job.rundir.storage.is_local)):
        note = f"nothing heard for {format_duration(silent)}"
    else:
        note = view.phase if row.running else ""
    step = view.step if row.running else max(view.step, row.step or 0)
    duration = "–" if row.seconds is None else format_duration(row.seconds)
    cost_label = "cost so far" if row.running else "cost"
    there, left, took = len({presence.node_id for presence in job.nodes}), job.time_left(now), row.totals
    figures = [
        ("state", row.state, note),
        ("step", f"{step:,}", f"{of}epoch {view.epoch}") if step else ("step", "–", ""),
        (
            "time left" if row.running else "took",
            (left.words if left is not None else "–") if row.running else duration,
            (f"has run for {took.words}" if row.running else took.of_which) if took and took.launches else "",
        ),
        ("loss", format_number(view.loss, 4), f"validation {format_number(view.valid_loss, 4)}"),
        ("samples/s", format_number(view.samples_per_second, 0), "all nodes, in the last steps")
        if row.running
        else ("samples/s", format_number(board.throughput.samples_per_second, 0), "all nodes, in all steps"),
        _nodes(job, there, now),
        (cost_label, dollars(job.cost[0]), job.cost[1]) if job.cost else ("cost", "–", "no price is known"),
    ]
    return [{"label": label, "value": value, "note": note} for label, value, note in figures]


def _nodes(job: OpenJob, there: int, now: float) -> tuple[str, str, str]:
    """Return the figure of the nodes: those that train, or have trained."""
    if not job.row.running:
        return "nodes used", str(there) if there else "–", ""
    missing = missing_nodes(tuple(job.dashboard.changes_of_nodes), job.nodes, job.row.state)
    returning = sum(node.node_id in missing and node.ended_at is None for node in job.nodes)
    lost = f", {len(missing)} lost" if missing else ""
    return "nodes alive", str(max(0, job.nodes_alive(now) - returning)), f"of {there}{lost}" if there else ""


def format_number(value: float | None, digits: int) -> str:
    """Return a number with ``digits`` decimals and thousands separators; a dash for None."""
    return "–" if value is None else f"{value:,.{digits}f}"
