"""SLURM as an engine that runs one-node jobs: its commands are run here or on a login node, and what fails is told.

What the commands are belongs in `commands`, what they print in `answers`, and what follows from it in
`dtrain_dagster.clusters.supervision`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.slurm import commands
from dtrain_dagster.clusters.slurm.answers import read_failure, read_job, read_rows
from dtrain_dagster.clusters.submission import Request, others_like_first, process_lines, shell_line
from dtrain_dagster.clusters.supervision.engine import (
    Command,
    Engine,
    EngineError,
    EngineJob,
    EngineUnreachableError,
    name_job,
    name_launch,
    read_job_name,
    tail_of,
)
from dtrain_dagster.settings.slurm import SlurmSettings
from dtrain_dagster.support.secrets import redact
from trainer.node.processes import MARK

TIMEOUT_SECONDS = 25.0
SSH_FAILED = 255


class SlurmEngine(Engine):
    """One cluster, through its commands."""

    def __init__(self, options: SlurmSettings, run_dir: str, command: Command) -> None:
        super().__init__(options, run_dir, command)
        self._known: dict[str, str] = {}
        """The id of each job that was submitted or seen → its name."""

    def submit(self, launch: Mapping[str, Any], node_id: int, incarnation: int, excluded: Sequence[str] = ()) -> str:
        """Submit the job of an incarnation. Where SLURM knows one of this name, or one has run and is
        forgotten, none is submitted."""
        name = name_job(launch, node_id, incarnation)
        rows = read_rows(self.run(commands.list_all(name)))
        ids = [row["JobID"] for row in rows] or self._ran(name)
        if not ids:
            self.log_folder.mkdir(parents=True, exist_ok=True)
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
        command, script = self.request(launch, 0, 1)
        where = f" on {self.options.host}, over ssh" if self.options.host else ""
        others = others_like_first(launch["node_count"], "with --node K, and -nK- in their names")
        text = f"{shell_line(command)} << 'BATCH'\n{redact(script)}BATCH"
        parts = [text, *([others] if others else []), process_lines(launch)]
        return [Request(title=f"node 0, submitted{where}", form="sh", text="\n".join(parts))]

    def list_jobs(self, launch: Mapping[str, Any]) -> list[EngineJob]:
        prefix = f"{name_launch(launch)}-"
        rows = [row for row in read_rows(self.run(commands.list_all())) if row["Name"].startswith(prefix)]
        self._known |= {row["JobID"]: row["Name"] for row in rows}
        return [job for job in map(read_job, rows) if job is not None]

    def cancel(self, ids: Sequence[str], force: bool) -> None:
        """End these jobs: in order, or at once with ``force``. An id that SLURM has given to another job since is left
        alone: ids begin again where a cluster lost its state."""
        names = {row["JobID"]: row["Name"] for row in read_rows(self.run(commands.list_all()))}
        own = [key for key in ids if read_job_name(name := names.get(key, "")) and self._known.get(key, name) == name]
        for command in commands.end(own, force) if own else ():
            with contextlib.suppress(EngineError):  # one has ended meanwhile
                self.run(command, "end nodes")

    def how_to_enter(self, job: EngineJob, address: str) -> str:
        shell = f"srun --jobid={job.id} --overlap --pty bash"
        return f"ssh -t {self.options.host} {shell}" if self.options.host else shell

    def read_log(self, job_id: str) -> str | None:
        path = next(iter(self.log_folder.glob(f"slurm-*-{job_id}.out")), None)
        return tail_of(path) if path else None

    def check(self) -> str:
        self.run(commands.list_all("none"))
        where = f" on {self.options.host}" if self.options.host else ""
        return f"{self.run(['sinfo', '--version']).strip()} answers{where}"

    def _ran(self, name: str) -> list[str]:
        """Return the ids of jobs of this name that have begun, from the files that SLURM made for their output."""
        return sorted((path.stem.rpartition("-")[2] for path in self.log_folder.glob(f"slurm-{name}-*.out")), key=int)

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
            raise EngineError(
                f"there is no {command[0]} on this machine: put SLURM's commands on the PATH, or set host in "
                "DTRAIN_SLURM_OPTIONS to a login node"
            ) from None
        except subprocess.TimeoutExpired:
            raise EngineUnreachableError(f"cannot {what}: SLURM does not answer {where}") from None
        if done.returncode == 0:
            return done.stdout
        said = " ".join((done.stderr or done.stdout).split())
        if done.returncode == SSH_FAILED and self.options.host:
            raise EngineUnreachableError(f"cannot {what}: {self.options.host} cannot be reached ({said})")
        if done.returncode == 127:
            raise EngineError(f"cannot {what} {where}: {said}; SLURM's commands must be on the PATH there")
        raise read_failure(what, said)


def _control_path() -> str:
    """Return where ssh keeps its connection: a folder of this user alone, with a path that a socket can have."""
    folder = Path(tempfile.gettempdir()) / f"dtrain-ssh-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if about.st_uid != os.getuid() or about.st_mode & 0o077 or folder.is_symlink():
        raise EngineError(f"{folder} is not a folder of this user alone: remove it")
    return f"{folder}/%C"
