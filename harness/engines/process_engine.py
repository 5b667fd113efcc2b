"""An engine of a few lines that runs the agents of nodes as processes of this machine, each in a session of its own.

It stands for engines whose nodes outlive their supervisor where the subject is our part and not the engine: its state
is in a folder, so another process can go on with it. ``python -m harness.engines.process_engine RUN_DIR FOLDER`` is a
supervisor with it; ``--hasty``: it waits half a second, not five, for an engine to end what it was told to end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from dtrain_dagster.clusters.hosts import HostRecord
from dtrain_dagster.clusters.submission import Request
from dtrain_dagster.clusters.supervision import supervisor
from dtrain_dagster.clusters.supervision.agent_placer import AgentPlacer
from dtrain_dagster.clusters.supervision.engine import (
    EngineJob,
    EngineUnreachableError,
    agent_command,
    name_job,
    name_launch,
)
from dtrain_dagster.clusters.supervision.supervisor import Supervisor, begin_clock
from trainer.rundir import RunDir


class ProcessEngine:
    """Jobs as processes. Files of ``folder`` steer it: ``down``: it does not answer; ``full``: jobs wait;
    ``NAME.lost``: the machine of a job cannot be reached, is taken for lost, and runs on; ``metadata``: the address of
    `harness.metadata_service`, of which each job's machine has the job's name; ``hold``: the seconds of the agents'
    ``--hold``."""

    poll_seconds = 0.3

    def __init__(self, folder: Path, run_dir: str, secret: str) -> None:
        self.folder, self.run_dir, self.secret = folder, run_dir, secret
        folder.mkdir(parents=True, exist_ok=True)

    def submit(self, launch: Mapping[str, Any], node_id: int, incarnation: int, excluded: Sequence[str] = ()) -> str:
        self._answer()
        name = name_job(launch, node_id, incarnation)
        with contextlib.suppress(FileExistsError):
            (self.folder / name).mkdir()
            hold = self.folder / "hold"
            seconds = float(hold.read_text()) if hold.exists() else 0.0
            command = agent_command(launch, self.run_dir, self.secret, node_id, incarnation, hold_seconds=seconds)
            about = {"node": node_id, "incarnation": incarnation, "at": time.time(), "command": command}
            (self.folder / name / "job.json").write_text(json.dumps(about))
        self._start(name)
        return name

    def describe(self, launch: Mapping[str, Any]) -> list[Request]:
        command = agent_command(launch, self.run_dir, self.secret, 0, 1)
        return [Request(title="node 0", form="sh", text=shlex.join(command))]

    def list_jobs(self, launch: Mapping[str, Any]) -> list[EngineJob]:
        self._answer()
        names = sorted(path.name for path in self.folder.glob(f"{name_launch(launch)}-*") if path.is_dir())
        for name in names:
            self._start(name)
        return [self._look(name) for name in names]

    def cancel(self, ids: Sequence[str], force: bool) -> None:
        self._answer()
        for name in ids:
            if (self.folder / f"{name}.lost").exists():
                continue
            (self.folder / name / "cancelled").touch()
            if (process := self._process(name)) is not None:
                for child in process.children(recursive=True):  # the agent, not the shell that notes its code
                    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
                        if force or child.ppid() == process.pid:
                            child.send_signal(signal.SIGKILL if force else signal.SIGTERM)

    def how_to_enter(self, job: EngineJob, address: str) -> str:
        return f"enter {job.id}"

    def read_log(self, job_id: str) -> str | None:
        path = self.folder / job_id / "out"
        return path.read_text() if path.exists() else None

    def agent(self, name: str) -> psutil.Process:
        """The agent of a job that runs."""
        process = self._process(name)
        assert process is not None
        return process.children()[0]

    def _answer(self) -> None:
        if (self.folder / "down").exists():
            raise EngineUnreachableError("the engine does not answer")

    def _start(self, name: str) -> None:
        place = self.folder / name
        if (place / "pid").exists() or (place / "cancelled").exists() or (self.folder / "full").exists():
            return
        command = json.loads((place / "job.json").read_text())["command"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DTRAIN_JOB")}
        if (metadata := self.folder / "metadata").exists():
            environment["DTRAIN_METADATA_URL"] = f"{metadata.read_text()}/{name}"
        shell = (
            f"{shlex.join(command)} > {place}/out 2>&1; echo $? > {place}/code.new; mv {place}/code.new {place}/code"
        )
        process = subprocess.Popen(["/bin/sh", "-c", shell], start_new_session=True, env=environment)
        (place / "pid").write_text(f"{process.pid} {psutil.Process(process.pid).create_time()}")

    def _process(self, name: str) -> psutil.Process | None:
        with contextlib.suppress(OSError, psutil.Error, ValueError):
            pid, created = (self.folder / name / "pid").read_text().split()
            process = psutil.Process(int(pid))
            if process.create_time() == float(created) and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def _look(self, name: str) -> EngineJob:
        place = self.folder / name
        about = json.loads((place / "job.json").read_text())
        code, process = place / "code", self._process(name)
        began = (place / "pid").exists()
        lost = self.folder / f"{name}.lost"
        is_lost = lost.exists()
        ended = (
            is_lost or code.exists() or (began and process is None) or (not began and (place / "cancelled").exists())
        )
        return EngineJob(
            id=name,
            node_id=about["node"],
            incarnation=about["incarnation"],
            state="ended" if ended else "running" if began else "pending",
            reason="" if began else "(Resources)",
            exit_code=int(code.read_text()) if code.exists() else None,
            lost=ended and (is_lost or not code.exists()),
            submitted_at=about["at"],
            started_at=(place / "pid").stat().st_mtime if began else None,
            ended_at=next((one.stat().st_mtime for one in (lost, code) if one.exists()), None),
        )


def main(arguments: Sequence[str]) -> int:
    rundir, folder = RunDir(arguments[0]), Path(arguments[1])
    if "--hasty" in arguments:
        supervisor.KILL_SECONDS = 0.5
    secret, clock = folder / "secret", begin_clock(rundir)
    engine = ProcessEngine(folder / "engine", rundir.uri, str(secret))

    placer = AgentPlacer(rundir, engine, secret, clock, HostRecord(folder / "hosts.jsonl"))
    print(Supervisor(rundir, placer, clock, lambda *news: None).run("--resume" in arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
