"""The path from a wanted training to the one job that does it: found, attached to, or started; then followed to its
end.

A job outlives the process that started it. Its id carries a fingerprint of *what* is trained and the Dagster run that
asked for it, so that asking again finds the job instead of buying a second one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

from dtrain_dagster.clusters.base import OWNER, ClusterError, GPUClusterManager, JobSpec, JobState, JobStatus
from dtrain_dagster.costs.plan import PLAN, is_spent, write_limit
from dtrain_dagster.jobs.orders import keep_order
from dtrain_dagster.jobs.spending import note_start
from dtrain_dagster.jobs.view import JobFollower, JobView, news
from dtrain_dagster.monitoring.hangs import HangNews
from dtrain_dagster.support.user_code import digest_sources, digest_user_code, trainer_sources
from dtrain_dagster.support.user_sources import StagingError
from trainer.config import PARTS, JobConfig
from trainer.differences import list_differences
from trainer.errors import DamagedError
from trainer.model.allowed_factories import refuse_foreign_factories
from trainer.printable import visible
from trainer.rundir import EVALUATION, JOB, LAUNCH, LIMIT, RESULT, RunDir
from trainer.runtime.launch import with_order

REGISTRATION = "registration.json"
"""File of a run directory: the name, version and alias under which the model was registered."""
BUDGET = "max_node_seconds"
"""Key in ``training`` that a person may raise to continue a job. It decides when the job stops, not its result."""
CLAIM = "claim.json"
"""File of a run directory: the Dagster run whose asset this job became. Its result is not taken a second time."""
PERFORMANCE_REPORT = "reports/performance_report.json"
"""File of a run directory: how fast its nodes were, and the diagnosis of all its steps, from the asset of that name."""
JOB_TAG = "dtrain/job"
"""The tag of a Dagster run that names the job which it follows."""


class BudgetSpentError(ClusterError):
    """A job has no budget left. The message says how much was paid."""


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


def fingerprint(job: JobConfig, node_count: int, processes_per_node: int, script: str = "") -> str:
    """Return eight hex digits over what decides the result: data, model, loss, training, code (a script's), ranks."""
    named = [getattr(job, part) for part in PARTS]
    own = [config.factory for config in named if config is not None]
    what = {
        "dataset": job.dataset.dataset_id or job.dataset.uri,
        "training": {name: value for name, value in asdict(job.training).items() if name != BUDGET},
        "code": [code_version(), *map(_own_digest, own), *filter(None, [script])],
        "ranks": [node_count, processes_per_node],
    }
    what |= {part: asdict(config) for part, config in zip(PARTS, named, strict=True) if config is not None}
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:8]


@cache
def code_version() -> str:
    """Return twelve hex digits over the source of the `trainer` package, the code that runs on the nodes."""
    return digest_sources(trainer_sources())


def _own_digest(factory: str) -> str:
    """Return what tells versions of a user's factory apart; "" where its sources are not found."""
    try:
        return digest_user_code(factory)
    except StagingError:
        return ""  # the start of the job says why


def ran_out(rundir: RunDir) -> bool:
    """Return whether the last launch stopped at its hard budget."""
    result, launch = rundir.read_json(RESULT) or {}, rundir.read_json(LAUNCH) or {}
    return result.get("status") == "budget" and result.get("launch") in (None, launch.get("launch"))


def start_job(
    manager: GPUClusterManager,
    job: JobConfig,
    node_count: int,
    processes_per_node: int,
    env: dict[str, str],
    stop_at_usd: float | None = None,
    command: tuple[str, ...] | None = None,
    part_of: str = "",
    keep_failed_seconds: float = 0.0,
) -> None:
    """Write ``job.json`` and run the trainer on the cluster, or a ``command`` that trains the job. A job that runs
    already is left alone, except for its budget. ``command``: Python, a script, its arguments. ``stop_at_usd``: of what
    ``max_node_seconds`` was computed. ``part_of``: the fleet or search that pays for it.
    ``keep_failed_seconds``: how long a node that fails is left in place. Raise `BudgetSpentError`, and
    buy nothing, where no budget is left."""
    refuse_foreign_factories(job)
    rundir = RunDir(job.run_dir)
    known, limit = rundir.read_json(JOB), job.training.max_node_seconds
    stopped_at = (rundir.read_json(LIMIT) or {}).get("max_node_seconds") if ran_out(rundir) else None
    there = None if known is None else rundir.read_job()
    keep_order(manager.home, job, there)
    if known is None or there is None:
        rundir.write_job(job)
    elif changed := list_differences(asdict(there.training), asdict(job.training)):  # as a person has changed them
        fields = {name.partition(".")[0] for name in changed}
        now = {name: value for name, value in asdict(job.training).items() if name in fields}
        rundir.write_json(JOB, known | {"training": known["training"] | now})
    spent = sum(node.seconds(node.last_seen_at or node.started_at) for node in rundir.nodes()) if limit else 0.0
    refused = limit is not None and is_spent(limit, spent, stopped_at)
    if not (refused and stopped_at):  # a job that stays stopped keeps on record where it stopped
        write_limit(rundir, limit, stop_at_usd)
    if limit is not None and refused:
        raise BudgetSpentError(
            f"job {job.job_id} was paid {spent / 3600:.4g} node-hours, its budget is {limit / 3600:.4g} "
            f"(training.{BUDGET} = {limit:g}): raise it to go on"
        )
    note_start(manager.home, job.job_id, part_of)
    spec = spec_of(manager, job, node_count, processes_per_node, env, command, keep_failed_seconds)
    manager.submit_job(spec)


def spec_of(
    manager: GPUClusterManager,
    job: JobConfig,
    node_count: int,
    processes_per_node: int,
    env: Mapping[str, str],
    command: tuple[str, ...] | None = None,
    keep_failed_seconds: float = 0.0,
) -> JobSpec:
    """Return what a cluster is asked to run for a training, or for a ``command`` that trains it. Pure."""
    trainer = (manager.python, "-m", "trainer", "--config", f"{job.run_dir}/job.json")
    return JobSpec(
        job_id=job.job_id,
        run_dir=job.run_dir,
        command=command or trainer,
        script=command[1] if command else "",
        node_count=node_count,
        processes_per_node=processes_per_node,
        master_port=job.training.master_port,
        env=with_order(env, run_dir=job.run_dir) if command else {**env},
        keep_failed_seconds=keep_failed_seconds,
        elastic=True,
    )


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
