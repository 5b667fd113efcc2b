"""The path from a wanted training to the one job that does it: found, attached to, or started; then followed to its
end.

A job outlives the process that started it. Its id carries a fingerprint of *what* is trained and the Dagster run that
asked for it, so that asking again finds the job instead of buying a second one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dtrain_dagster.clusters.base import OWNER, GPUClusterManager, JobState, JobStatus
from dtrain_dagster.costs.plan import PLAN
from dtrain_dagster.jobs.view import JobFollower, JobView, news
from dtrain_dagster.monitoring.hangs import HangNews
from trainer.errors import DamagedError
from trainer.printable import visible
from trainer.rundir import EVALUATION, JOB, LIMIT, RESULT, RunDir

REGISTRATION = "registration.json"
"""File of a run directory: the name, version and alias under which the model was registered."""
CLAIM = "claim.json"
"""File of a run directory: the Dagster run whose asset this job became. Its result is not taken a second time."""
PERFORMANCE_REPORT = "reports/performance_report.json"
"""File of a run directory: how fast its nodes were, and the diagnosis of all its steps, from the asset of that name."""
JOB_TAG = "dtrain/job"
"""The tag of a Dagster run that names the job which it follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownJob:
    """A job of the cluster that does the wanted training."""

    job_id: str
    state: JobState
    claimed: bool
    has_checkpoint: bool = False
    damage: str = ""
    """The damage of its run directory if it cannot be read."""
    is_starved: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class JobChoice:
    """The action that gets a training done, and its reason in words for the log."""

    action: Literal["start", "attach", "adopt", "restart"]
    job_id: str
    reason: str


def choose_job(fingerprint: str, root_run_id: str, known: Sequence[KnownJob]) -> JobChoice:
    """Return the job that does this training. ``known``: jobs of the cluster, newest first.

    The job of the same root run comes first (a retry of the run continues it); then any job of the same fingerprint
    that runs, or that succeeded without becoming an asset (its orchestrator died); then the newest of the fingerprint,
    if it did not succeed but left a checkpoint: it is continued. Only then is a new one started. A damaged job is left
    alone, and its id is not used again.
    """
    damaged = {job.job_id: job.damage for job in known if job.damage}
    known = [job for job in known if not job.damage]
    name = f"train-{fingerprint}-{root_run_id[:8]}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    own = next(name for name in names if name not in damaged)
    for job in known:
        if job.job_id == own:
            if not job.state.is_final:
                return JobChoice(action="attach", job_id=own, reason="this run's job is already running")
            if job.state is JobState.SUCCEEDED:
                return JobChoice(action="adopt", job_id=own, reason="this run's job has already succeeded")
            return JobChoice(
                action="restart", job_id=own, reason=f"this run's job was {job.state}; it continues in its folder"
            )
    alike = [job for job in known if job.job_id.startswith(f"train-{fingerprint}-")]
    same = [job for job in alike if not job.claimed]
    for job in same:
        if not job.state.is_final:
            return JobChoice(action="attach", job_id=job.job_id, reason="a job of the same training is already running")
    for job in same:
        if job.state is JobState.SUCCEEDED:
            reason = "a job of the same training succeeded after its orchestrator was gone"
            return JobChoice(action="adopt", job_id=job.job_id, reason=reason)
    if alike and (alike[0].has_checkpoint or alike[0].is_starved) and not alike[0].claimed:
        where = "from its latest checkpoint" if alike[0].has_checkpoint else "in its folder: it never had nodes"
        reason = f"the last job of the same training was {alike[0].state}; it continues {where}"
        return JobChoice(action="restart", job_id=alike[0].job_id, reason=reason)
    alone = "".join(f"; {job_id} is left alone: {damage}" for job_id, damage in damaged.items())
    return JobChoice(action="start", job_id=own, reason=f"no job of this training runs{alone}")


def known_jobs(manager: GPUClusterManager, jobs_uri: str, fingerprint: str) -> list[KnownJob]:
    """Return the cluster's jobs of this training, newest first."""
    known = []
    for status in manager.list_jobs(f"train-{fingerprint}-"):
        rundir = RunDir(f"{jobs_uri}/{status.job_id}")
        damage, claimed, latest = status.damage, False, None
        if not damage:
            try:
                claimed, latest = rundir.read_json(CLAIM) is not None, rundir.latest_checkpoint()
                _require_whole(rundir, status.state)
            except DamagedError as error:
                damage = str(error)
        known.append(
            KnownJob(
                job_id=status.job_id,
                state=status.state,
                claimed=claimed,
                has_checkpoint=latest is not None,
                damage=damage,
                is_starved=status.starved is not None,
            )
        )
    return known


def _require_whole(rundir: RunDir, state: JobState) -> None:
    """Raise `DamagedError` for a job that cannot be attached to, continued or adopted."""
    for name in (JOB, OWNER, LIMIT, PLAN, RESULT, EVALUATION) if state.is_final else (JOB, OWNER, LIMIT, PLAN):
        rundir.read_json(name)
    rundir.nodes()


def follow_job(
    manager: GPUClusterManager,
    rundir: RunDir,
    job_id: str,
    take: Callable[[list[dict[str, Any]]], object] = lambda events: None,
) -> Iterator[tuple[JobStatus, JobView]]:
    """Yield the job's status and view, again and again, until it has ended; the last one yielded is final. ``take`` is
    called before each with the events that have come since."""
    follower, hang_news = JobFollower(rundir), HangNews()
    kept: tuple[str, ...] = ()
    while True:
        status = manager.job_status(job_id)  # asked first, so that the final round reads all events
        told: tuple[str, ...] = ()
        for events in follower.read(is_live=not status.state.is_final):
            take(events)
            told += news(events)
        hang = map(visible, hang_news.tell(follower.view.hang, time.time(), status.state.is_final))
        if status.kept != kept:
            kept = status.kept
            told += tuple(map(visible, words_of_kept(status) if kept else ()))
        yield status, replace(follower.view, news=(*dict.fromkeys(told), *hang), nodes_alive=status.nodes_alive)
        if status.state.is_final:
            return
        time.sleep(manager.poll_seconds)


def words_of_kept(status: JobStatus) -> list[str]:
    """Return what a person is told of a job that has failed and whose nodes are kept. Pure."""
    return [status.message.partition("\n")[0], *status.kept, f"give them back: dtrain cancel {status.job_id}"]


class WaitNews:
    """What was told last of one job that is followed."""

    def __init__(self) -> None:
        self._told = ""

    def tell(self, status: JobStatus) -> str:
        """Return a sentence where the reason of the wait is another than before, or the wait is over; else ""."""
        words = describe_wait(status)
        reason = words.partition(";")[0]  # what follows is how long it has been
        if reason == self._told:
            return ""
        self._told = reason
        return words or ("" if status.state.is_final else "all nodes have their places")


def describe_wait(status: JobStatus) -> str:
    """Return what a job that goes on waits for, in the words of its cluster; "" where it does not wait. Pure."""
    return "" if status.state.is_final else visible(status.message)
