"""The interface to an engine that runs the nodes of a job for us: SLURM, Kubernetes, Ray.

An engine runs one-node jobs, one for each incarnation of a node; each runs the node agent (`trainer.node`). It
submits, lists and cancels them, and says of each what it knows. What follows from that is in `agent_placer`.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.clusters.submission import Request
from trainer.node.environment import LaunchError
from trainer.rundir import LOGS

NAME_DIGITS = 24
"""Digits of a launch's token in the names of its jobs: 96 random bits, short enough for a label of Kubernetes."""
MAX_LOG_BYTES = 4 * 2**20
_JOB_NAME = re.compile(r"dtrain-[0-9a-z]+-l\d+-n(\d+)-s(\d+)")
Cause = Literal["", "machine", "taken", "program"]
Command = Callable[[Mapping[str, Any], int, int], Sequence[str]]
"""What the job of an incarnation runs, for launch, node and incarnation."""


class EngineUnreachableError(OSError):
    """The engine did not answer: its control plane restarts, or the network is down. The same request may succeed
    later."""


class EngineError(ClusterError, LaunchError):
    """The engine cannot be used as it is configured, or refuses a request for good. The message has the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineJob:
    """One job of an engine: one incarnation of one node, as the engine describes it now."""

    id: str
    node_id: int
    incarnation: int
    state: Literal["pending", "running", "ended"]
    reason: str = ""
    """Why it waits, with the remedy where one is known, or why it ended; "" where there is nothing to say."""
    host: str = ""
    """The machine that it runs on, as the engine calls it."""
    exit_code: int | None = None
    """The exit code of the agent, or minus the number of the signal; None while it runs, or where it is unknown."""
    lost: bool = False
    """Whether the engine took the node away, or lost it: preempted, evicted, at the end of its time limit, machine not
    there. Such an end is nobody's failure."""
    cause: Cause = ""
    """Whose doing that end was, where the engine says: its machine failed; the node was taken away, as by preemption, a
    drain, a time limit or a person; the program failed, as by too much memory."""
    is_planned: bool = False
    """Whether that end was known from the start, as that of a time limit is: it counts for no replacement."""
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    ends_at: float | None = None
    """The time at which the engine will end it whatever it does; None where there is no such limit. All times are Unix
    seconds."""


class Engine(ABC):
    """What runs one-node jobs. Every call returns within half a minute, and raises `EngineUnreachableError` where the
    engine cannot be asked now."""

    poll_seconds: float = 2.0
    """Seconds between two calls of `list_jobs`."""
    hold_seconds: ClassVar[float] = 0.0
    """Seconds for which a node that is told to end trains on until another is there in its place."""

    def __init__(self, options: Any, run_dir: str, command: Command) -> None:
        """``options``: the settings of this engine. ``run_dir``: of the job, the same path here and on the nodes."""
        self.options, self.run_dir, self.command = options, run_dir, command
        self.log_folder = Path(run_dir) / LOGS

    @abstractmethod
    def submit(self, launch: Mapping[str, Any], node_id: int, incarnation: int, excluded: Sequence[str] = ()) -> str:
        """Start the agent of one incarnation of a node, and return the id of its job. A job of `name_job` that is there
        already is returned, and not bought twice. ``excluded``: the hosts, as `EngineJob.host` has them, on which it is
        not placed. Raise `EngineError` where the engine refuses it for good."""

    @abstractmethod
    def describe(self, launch: Mapping[str, Any]) -> list[Request]:
        """Return what `submit` asks the engine for when a launch begins, one node after the other. The engine is not
        asked."""

    @abstractmethod
    def list_jobs(self, launch: Mapping[str, Any]) -> list[EngineJob]:
        """Return the jobs of this launch (same token and number) that the engine still knows."""

    @abstractmethod
    def cancel(self, ids: Sequence[str], force: bool) -> None:
        """Ask the engine to end these jobs: with SIGTERM first, or, with ``force``, at once and without waiting for the
        machine's answer. Jobs that have ended, or that it does not know, are passed over."""

    @abstractmethod
    def how_to_enter(self, job: EngineJob, address: str) -> str:
        """Return the command that opens a shell where this job runs, or what there is instead. ``address``: at which
        other nodes reach it."""

    @abstractmethod
    def read_log(self, job_id: str) -> str | None:
        """Return what the agent printed, at most its last `MAX_LOG_BYTES`; None where the engine keeps nothing."""

    @abstractmethod
    def check(self) -> str:
        """Return what the engine answers, as a sentence. Nothing is created. Raise `EngineError` where it cannot be
        used."""

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End what talks with the engine; its jobs go on."""


def name_launch(launch: Mapping[str, Any]) -> str:
    """Return a name of this launch that no other has, of lower-case letters, digits and hyphens."""
    return f"dtrain-{launch['token'][-NAME_DIGITS:]}-l{launch['launch']}"


def name_job(launch: Mapping[str, Any], node_id: int, incarnation: int) -> str:
    """Return the name of one incarnation's job, of at most 63 lower-case letters, digits and hyphens for numbers below
    1000."""
    return f"{name_launch(launch)}-n{node_id}-s{incarnation}"


def read_job_name(name: str) -> tuple[int, int] | None:
    """Return node and incarnation of a `name_job`; None for another name."""
    match = _JOB_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def tail_of(path: Path) -> str:
    """Return the last `MAX_LOG_BYTES` of a file as text."""
    return path.read_bytes()[-MAX_LOG_BYTES:].decode(errors="replace")


def agent_command(
    launch: Mapping[str, Any],
    run_dir: str,
    secret: str,
    node_id: int,
    incarnation: int,
    python: str = sys.executable,
    hold_seconds: float = 0.0,
) -> list[str]:
    """Return the command that an engine runs on a node. ``secret``: the path of the file with the launch's secret.
    ``python``: the interpreter there. ``hold_seconds``: for how long it trains on after SIGTERM, until another node is
    there in its place."""
    path = launch["env"].get("PYTHONPATH")
    return [
        *(["/usr/bin/env", f"PYTHONPATH={path}"] if path else []),
        *(python, "-P", "-m", "trainer.node", run_dir),
        *("--launch", str(launch["launch"]), "--node", str(node_id), "--incarnation", str(incarnation)),
        *(["--secret-file", secret] if secret else []),
        *(["--hold", f"{hold_seconds:g}"] if hold_seconds else []),
    ]
