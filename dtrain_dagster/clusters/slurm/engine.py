"""SLURM as an engine that runs one-node jobs: its commands are run here or on a login node, and what fails is told.
Beside it stands SLURM's account of a job's nodes, held against their own presence, in words: the two begin and end at
different moments. SLURM counts from the start of the batch script, and until all of it is cleaned up; a presence from
the start of the agent to the end of its ranks.

What the commands are belongs in `commands`, what they print in `answers`, and what follows from it in
`dtrain_dagster.clusters.supervision`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.clusters.presence import end_of
from dtrain_dagster.clusters.slurm import commands
from dtrain_dagster.clusters.slurm.answers import (
    is_full,
    is_own,
    is_unreachable,
    place_in,
    read_accounted,
    read_job,
    read_rows,
    remedy_of,
)
from dtrain_dagster.clusters.submission import Request, others_like_first, process_lines, shell_line
from dtrain_dagster.clusters.supervision.engine import EngineJob, EngineUnreachableError, name_job, name_launch
from dtrain_dagster.settings.slurm import SlurmSettings, read_partition_prices
from dtrain_dagster.support.secrets import redact
from trainer.documents.presences import NodePresence
from trainer.node.environment import LaunchError
from trainer.node.processes import MARK
from trainer.rundir import LAUNCH, RunDir

TIMEOUT_SECONDS = 25.0
SSH_FAILED = 255
MAX_LOG_BYTES = 4 * 2**20
ACCOUNT_SECONDS = 60.0
"""Seconds between two questions to the accounting, which many share."""
ACCOUNTED_DAYS = 30
"""Days for which the accounting is asked for a job: ids begin again some day."""


class SlurmError(ClusterError, LaunchError):
    """The cluster cannot be used as it is configured, or refuses a job for good. The message has the remedy."""


class SlurmEngine:
    """One cluster, through its commands."""

    def __init__(
        self, options: SlurmSettings, log_folder: Path, command: Callable[[Mapping[str, Any], int, int], Sequence[str]]
    ) -> None:
        """``log_folder``: where the output of jobs goes, the same path here and on the nodes. ``command``: returns what
        the job of an incarnation runs, for launch, node and incarnation."""
        self.options, self.log_folder, self.command = options, log_folder, command
        self.poll_seconds = options.poll_seconds
        self._known: dict[str, str] = {}
        """The id of each job that was submitted or seen, and whose end was not → its name."""
        self._forgotten: dict[str, EngineJob] = {}
        """What the accounting said of those that SLURM itself has forgotten, by id."""
        self._asks_account_at = 0.0
        """When the accounting may be asked again (of `time.monotonic`)."""

    def submit(self, launch: Mapping[str, Any], node_id: int, incarnation: int, excluded: Sequence[str] = ()) -> str:
        """Submit the job of an incarnation, and return its id. Where SLURM knows a job of this name, or one has run and
        is forgotten, its id is returned, and none is submitted. Raise `SlurmError` where it is refused."""
        name = name_job(launch, node_id, incarnation)
        rows = read_rows(self.run(commands.list_all(name)))
        ids = [row["JobID"] for row in rows] or self._ran(name)
        if not ids:
            command, script = self.request(launch, node_id, incarnation, excluded)
            ids = [self.run(command, f"submit node {node_id}", script).strip().partition(";")[0]]
        self._known[ids[-1]] = name
        return ids[-1]

    def request(
        self, launch: Mapping[str, Any], node_id: int, incarnation: int, excluded: Sequence[str] = ()
    ) -> tuple[list[str], str]:
        """Return the command that submits an incarnation, and the batch script that it reads. Nothing is asked."""
        name = name_job(launch, node_id, incarnation)
        output = str(self.log_folder / f"slurm-{name}-").replace("%", "%%") + "%j.out"
        command = commands.submit(self.options, launch, node_id, incarnation, output, excluded)
        return command, commands.script(self.options, self.command(launch, node_id, incarnation))

    def describe(self, launch: Mapping[str, Any]) -> list[Request]:
        """Return what is submitted for the nodes of a launch: that of node 0, and how the others differ."""
        command, script = self.request(launch, 0, 1)
        where = f" on {self.options.host}, over ssh" if self.options.host else ""
        others = others_like_first(launch["node_count"], "with --node K, and -nK- in their names")
        text = f"{shell_line(command)} << 'BATCH'\n{redact(script)}BATCH"
        parts = [text, *([others] if others else []), process_lines(launch)]
        return [Request(title=f"node 0, submitted{where}", form="sh", text="\n".join(parts))]

    def list_jobs(self, launch: Mapping[str, Any]) -> list[EngineJob]:
        """Return the nodes of a launch that SLURM still knows, as it does for MinJobAge seconds after their end, and
        those that ended before and that its accounting knows."""
        prefix = f"{name_launch(launch)}-"
        rows = [row for row in read_rows(self.run(commands.list_all())) if row["Name"].startswith(prefix)]
        queues = {row["Partition"] for row in rows if row["State"] == "PENDING"}
        waiting = {queue: self.run(commands.list_waiting(queue)).split() for queue in queues}
        jobs = (read_job(row, place_in(waiting.get(row["Partition"], ()), row["JobID"])) for row in rows)
        found = {job.id: job for job in jobs if job is not None}
        self._known |= {row["JobID"]: row["Name"] for row in rows if row["JobID"] in found}
        for job in found.values():
            if job.state == "ended":
                del self._known[job.id]
        missing = [key for key, name in self._known.items() if name.startswith(prefix) and key not in found]
        self._ask_account([key for key in missing if key not in self._forgotten])
        return [*found.values(), *(self._forgotten[key] for key in missing if key in self._forgotten)]

    def cancel(self, ids: Sequence[str], force: bool) -> None:
        """End these jobs: in order, or at once with ``force``. An id that SLURM has given to another job since is left
        alone: ids begin again where a cluster lost its state."""
        names = {row["JobID"]: row["Name"] for row in read_rows(self.run(commands.list_all()))}
        own = [key for key in ids if is_own(name := names.get(key, "")) and self._known.get(key, name) == name]
        for command in commands.end(own, force) if own else ():
            with contextlib.suppress(SlurmError):  # one has ended meanwhile
                self.run(command, "end nodes")

    def how_to_enter(self, job: EngineJob, address: str) -> str:
        shell = f"srun --jobid={job.id} --overlap --pty bash"
        return f"ssh -t {self.options.host} {shell}" if self.options.host else shell

    def read_log(self, job_id: str) -> str | None:
        """Return what a job printed, at most its last `MAX_LOG_BYTES`; None where there is nothing."""
        path = next(iter(self.log_folder.glob(f"slurm-*-{job_id}.out")), None)
        return path.read_bytes()[-MAX_LOG_BYTES:].decode(errors="replace") if path else None

    def check(self) -> str:
        """Return the version of SLURM. Raise `SlurmError` where its commands cannot be run, `EngineUnreachableError`
        where its controller does not answer. Nothing is submitted."""
        self.run(commands.list_all("none"))
        return self.run(["sinfo", "--version"]).strip()

    def _ran(self, name: str) -> list[str]:
        """Return the ids of jobs of this name that have begun, from the files that SLURM made for their output."""
        return sorted((path.stem.rpartition("-")[2] for path in self.log_folder.glob(f"slurm-{name}-*.out")), key=int)

    def _ask_account(self, ids: Sequence[str]) -> None:
        """Ask the accounting how these jobs ended. A cluster without one says nothing of them, now and then."""
        if not ids or time.monotonic() < self._asks_account_at:
            return
        self._asks_account_at = time.monotonic() + ACCOUNT_SECONDS
        try:
            told = self.run(commands.find_ended(ids, time.time() - ACCOUNTED_DAYS * 86400), "read the accounting")
        except (SlurmError, EngineUnreachableError):  # squeue answered: the nodes are what counts
            return
        for row in read_accounted(told):
            if (job := read_job(row)) is not None and self._known.get(job.id) == row["Name"]:
                self._forgotten[job.id] = job

    def run(self, command: Sequence[str], what: str = "look at the queue", given: str = "") -> str:
        """Run one of SLURM's commands with ``given`` as its input, and return what it prints. Raise as `check` does."""
        left_out = (*commands.PERSONAL, MARK)
        own = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        where = "on this machine"
        if self.options.host:
            command, where = commands.remote(self.options.host, _control_path(), command), f"on {self.options.host}"
        try:
            done = subprocess.run(
                command,
                input=given,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                env=own | commands.TIMES,
                errors="replace",
            )
        except FileNotFoundError:
            raise SlurmError(
                f"there is no {command[0]} on this machine: put SLURM's commands on the PATH, or set DTRAIN_SLURM_HOST "
                "to a login node"
            ) from None
        except subprocess.TimeoutExpired:
            raise EngineUnreachableError(f"cannot {what}: SLURM does not answer {where}") from None
        if done.returncode == 0:
            return done.stdout
        said = " ".join((done.stderr or done.stdout).split())
        if done.returncode == SSH_FAILED and self.options.host:
            raise EngineUnreachableError(f"cannot {what}: {self.options.host} cannot be reached ({said})")
        if done.returncode == 127:
            raise SlurmError(f"cannot {what} {where}: {said}; SLURM's commands must be on the PATH there")
        if is_full(said):
            raise EngineUnreachableError(f"the queue is full: SLURM takes no more jobs of this user now ({said})")
        if is_unreachable(said):
            raise EngineUnreachableError(f"cannot {what} now: {said}")
        raise SlurmError(f"cannot {what}: {said}; {remedy_of(said)}")


def _control_path() -> str:
    """Return where ssh keeps its connection: a folder of this user alone, with a path that a socket can have."""
    folder = Path(tempfile.gettempdir()) / f"dtrain-ssh-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if about.st_uid != os.getuid() or about.st_mode & 0o077 or folder.is_symlink():
        raise SlurmError(f"{folder} is not a folder of this user alone: remove it")
    return f"{folder}/%C"


class AccountedJob(NamedTuple):
    """One job, as SLURM accounts it."""

    seconds: float
    state: str
    partition: str


def describe_account(options: Mapping[str, Any], rundir: RunDir) -> list[str]:
    """Return both accounts of a job's nodes as lines for people; none where SLURM has no account of them, or cannot be
    asked now: presence is what costs are computed from."""
    launch = rundir.read_json(LAUNCH) or {}
    names = {
        node: name_job({**launch, "launch": node.launch}, node.node_id, node.incarnation) for node in rundir.nodes()
    }
    if not names:
        return []
    engine = SlurmEngine(SlurmSettings.of(options), Path(), lambda launch, node_id, incarnation: ())
    since = min(node.started_at for node in names) - 3600
    try:
        told = engine.run(commands.account(list(names.values()), since), "read the accounting")
    except (ClusterError, EngineUnreachableError):
        return []
    return compare_accounts(names, read_account(told), read_partition_prices(), time.time())


def read_account(text: str) -> dict[str, AccountedJob]:
    """Return name of a job → its account, from what sacct prints. A job that was accounted twice counts twice."""
    found: dict[str, AccountedJob] = {}
    for line in text.splitlines():
        row = dict(zip(commands.ACCOUNTED, line.split("|"), strict=False))
        if len(row) == len(commands.ACCOUNTED) and row["ElapsedRaw"].isdigit():
            before = found[row["JobName"]].seconds if row["JobName"] in found else 0.0
            found[row["JobName"]] = AccountedJob(
                before + float(row["ElapsedRaw"]), row["State"].split()[0], row["Partition"]
            )
    return found


def compare_accounts(
    names: Mapping[NodePresence, str], account: Mapping[str, AccountedJob], prices: Mapping[str, float], now: float
) -> list[str]:
    """Return a line for each node by both accounts, their sum, and what the site charges for it; none where SLURM has
    no node. Pure. ``names``: presence → the name of its job. ``prices``: partition → US dollars per node-hour; those
    without one are named, and not counted. ``now``: Unix seconds, until which a node that has not ended was present."""
    lines = [f"{'launch':>6} {'node':>4} {'incarnation':>11} {'presence':>10} {'SLURM':>10} {'difference':>10}  ended"]
    both: list[tuple[float, AccountedJob]] = []
    for node, name in names.items():
        seconds, job = (end_of(node) if node.ended_at is not None else now) - node.started_at, account.get(name)
        told, difference, state = "none", "", ""
        if job is not None:
            both.append((seconds, job))
            told, difference, state = f"{job.seconds:.0f} s", f"{job.seconds - seconds:+.1f} s", job.state.lower()
        lines.append(
            f"{node.launch:>6} {node.node_id:>4} {node.incarnation:>11} {seconds:>8.1f} s {told:>10} {difference:>10}  "
            f"{state}"
        )
    if not both:
        return []
    present, accounted = sum(seconds for seconds, _ in both), sum(job.seconds for _, job in both)
    share = f" ({(accounted - present) / present:+.1%})" if present else ""
    lines.append(
        f"{len(both)} of {len(names)} nodes in both: {present:.1f} s of presence, {accounted:.0f} s in SLURM's "
        f"accounting{share}; costs are computed from presence"
    )
    if prices:
        priced = [(prices[job.partition] / 3600, seconds, job) for seconds, job in both if job.partition in prices]
        without = sorted({job.partition for _, job in both} - set(prices))
        lines.append(
            f"at the prices of the partitions: ${sum(price * seconds for price, seconds, _ in priced):.4f} by "
            f"presence, ${sum(price * job.seconds for price, _, job in priced):.4f} by SLURM's accounting "
            f"({len(priced)} nodes)" + (f"; no price is given for {', '.join(without)}" if without else "")
        )
    return lines
