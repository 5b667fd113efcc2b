"""Ray as an engine that runs one-node jobs: the driver's process is started, asked and started again.

What is asked of the cluster belongs in `driver`, and what follows from it in `dtrain_dagster.clusters.supervision`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from dtrain_dagster.clusters.ray.driver import ACTOR, actor_options
from dtrain_dagster.clusters.submission import Request, json_text, others_like_first, process_lines
from dtrain_dagster.clusters.supervision.engine import (
    Cause,
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
from dtrain_dagster.settings.ray import FIXED, RaySettings
from trainer.node.processes import MARK

S = "DTRAIN_RAY_"


def read_actor(
    actor: Mapping[str, Any], largest: Sequence[Mapping[str, float]], code: int | None, demand: Mapping[str, float]
) -> EngineJob | None:
    """Return the state of a node; None for an actor that is no node of ours.

    ``largest``: the resources of each machine of the cluster. ``code``: the exit code of the agent, where it has
    written one. ``demand``: what a node asks for.
    """
    if (own := read_job_name(actor["name"])) is None:
        return None
    state: Literal["pending", "running", "ended"] = "running"
    reason, lost = "", False
    cause: Cause = ""
    if actor["state"] in ("DEPENDENCIES_UNREADY", "PENDING_CREATION"):
        state, reason = "pending", explain_waiting(demand, largest)
    elif actor["state"] == "DEAD":
        state, lost = "ended", code is None
        reason = " ".join(str(actor["why"]).split())[:MOST_WORDS] if lost else ""
        cause = _cause_of(reason.lower()) if lost else ""
    return EngineJob(
        id=actor["name"],
        node_id=own[0],
        incarnation=own[1],
        state=state,
        reason=reason,
        host=actor["host"],
        exit_code=code if state == "ended" else None,
        lost=lost,
        cause=cause,
    )


def _cause_of(reason: str) -> Cause:
    """Return whose doing the end of an actor was, from Ray's words in lower case."""
    if "out of memory" in reason or "low on memory" in reason or "oom" in reason.split():
        return "program"
    if "node" in reason and ("died" in reason or "terminated" in reason or "unhealthy" in reason):
        return "machine"
    return "taken" if "ray.kill" in reason or "preempt" in reason or "drain" in reason else ""


def explain_waiting(demand: Mapping[str, float], largest: Sequence[Mapping[str, float]]) -> str:
    """Return why a node waits: no machine is as large, or others hold the place."""
    for name, amount in demand.items():
        most = max((machine.get(name, 0.0) for machine in largest), default=0.0)
        if amount > most:
            setting = FIXED.get(name, f"resources in {S}OPTIONS")
            said = f"no machine is large enough ({name} {amount:g}, the largest has {most:g})"
            return f"{said}: lower {setting}, or add one"
    return "no machine is free"


DRIVER = "dtrain_dagster.clusters.ray.driver"
START_SECONDS, ANSWER_SECONDS = 60.0, 25.0
"""Seconds for the first answer of a driver, which has to join the cluster, and for any other."""
AGAIN_SECONDS = 5.0
"""Seconds after a failure in which no driver is started: a job asks once for each of its nodes."""
MOST_WORDS = 300
"""Characters of Ray's own words that are repeated."""


def _knock(address: str) -> None:
    """Raise `EngineUnreachableError` where nothing listens at an address: Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
    except OSError as error:
        raise EngineUnreachableError(
            f"no Ray cluster at {address} ({error.strerror or error}); start one with `ray start --head`, or set "
            "DTRAIN_RAY_ADDRESS"
        ) from None


class RayEngine(Engine):
    """One cluster, through a driver of it."""

    poll_seconds = 1.0

    def __init__(self, options: RaySettings, run_dir: str, command: Command) -> None:
        super().__init__(options, run_dir, command)
        self._driver: tuple[subprocess.Popen[bytes], Connection[Any, Any]] | None = None
        self._failed: tuple[float, str] = float("-inf"), ""
        """When the cluster could not be asked last (`time.monotonic`), and why."""
        self._ended: dict[str, float] = {}
        """When the end of a node was seen first, in Unix seconds: Ray's lists do not say."""

    def submit(self, launch: Mapping[str, Any], node_id: int, incarnation: int, excluded: Sequence[str] = ()) -> str:
        self.log_folder.mkdir(parents=True, exist_ok=True)
        return str(self._ask("submit", **self.request(launch, node_id, incarnation), excluded=list(excluded)))

    def request(self, launch: Mapping[str, Any], node_id: int, incarnation: int) -> dict[str, Any]:
        """Return the actor of an incarnation: its options, and what it runs with its output where. Nothing is asked."""
        name = name_job(launch, node_id, incarnation)
        return {
            "options": actor_options(name, self.options.demand()),
            "command": list(self.command(launch, node_id, incarnation)),
            "output": str(self._output(name)),
        }

    def describe(self, launch: Mapping[str, Any]) -> list[Request]:
        others = others_like_first(launch["node_count"], "with --node K, and -nK- in their names")
        parts = [json_text({"class": ACTOR, **self.request(launch, 0, 1)}), others, process_lines(launch)]
        title = f"node 0, a detached actor on the Ray cluster at {self.options.address}"
        return [Request(title=title, form="json", text="\n".join(filter(None, parts)))]

    def list_jobs(self, launch: Mapping[str, Any]) -> list[EngineJob]:
        found = self._ask("list_actors", prefix=f"{name_launch(launch)}-")
        demand = self.options.demand()
        jobs = (read_actor(actor, found["largest"], self._code(actor["name"]), demand) for actor in found["actors"])
        now = time.time()
        return [
            replace(job, ended_at=self._ended.setdefault(job.id, now)) if job.state == "ended" else job
            for job in jobs
            if job is not None
        ]

    def cancel(self, ids: Sequence[str], force: bool) -> None:
        self._ask("end", names=list(ids), force=force)

    def how_to_enter(self, job: EngineJob, address: str) -> str:
        return f"ssh {address or job.host}  (Ray itself opens no shell)"

    def read_log(self, job_id: str) -> str | None:
        path = self._output(job_id)
        return tail_of(path) if path.exists() else None

    def check(self) -> str:
        machines = len(self._ask("list_actors", prefix="none-")["largest"])
        return f"{machines} machine(s) of the Ray cluster answer"

    def close(self) -> None:
        if self._driver is not None:
            process, pipe = self._driver
            process.kill()
            process.wait()
            pipe.close()
            self._driver = None

    # ---

    def _output(self, name: str) -> Path:
        return self.log_folder / f"ray-{name}.out"

    def _code(self, name: str) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int(Path(f"{self._output(name)}.code").read_text())
        return None

    def _ask(self, do: str, **given: Any) -> Any:
        """Have a driver do something, which is started where there is none. One that does not answer, or has lost its
        cluster, which it does not find again, is ended."""
        seconds = START_SECONDS if self._driver is None else ANSWER_SECONDS
        _, pipe = self._driver = self._driver or self._start()
        try:
            pipe.send((do, given))
            if not pipe.poll(seconds):
                raise TimeoutError(f"no answer within {seconds:.0f} s")
            found, wrong = pipe.recv()
        except (EOFError, ConnectionError):
            found, wrong = None, "its driver has ended"
        except OSError as error:
            found, wrong = None, str(error)
        if not wrong:
            return found
        self.close()
        if "No module named 'ray'" in wrong:
            raise EngineError("DTRAIN_CLUSTER=ray needs the package ray: pip install 'dtrain[ray]'")
        why = (
            f"the Ray cluster at {self.options.address} does not answer: {wrong[:MOST_WORDS]}; is it there? Else start "
            f"one with `ray start --head`, or set {S}ADDRESS"
        )
        self._failed = time.monotonic(), why
        raise EngineUnreachableError(why)

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
        address = self.options.address
        if time.monotonic() - self._failed[0] < AGAIN_SECONDS:
            raise EngineUnreachableError(self._failed[1])
        try:
            _knock(address)
        except EngineUnreachableError as error:
            self._failed = time.monotonic(), str(error)
            raise
        left_out = {MARK} if address == "auto" else {MARK, "RAY_ADDRESS"}
        own = {name: value for name, value in os.environ.items() if name not in left_out}
        ours, theirs = Pipe()
        dashboard = [self.options.dashboard] if self.options.dashboard else []
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", DRIVER, str(theirs.fileno()), address, *dashboard],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=own | {"RAY_DISABLE_IMPORT_WARNING": "1", "PYTHONWARNINGS": "ignore"},
        )
        theirs.close()
        return process, ours
