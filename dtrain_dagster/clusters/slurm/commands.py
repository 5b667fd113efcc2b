"""The command lines of SLURM: submit a node, list a user's jobs, end some of them. Pure.

What they print is read in `answers`; they are run by `engine`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from dtrain_dagster.clusters.supervision.engine import name_job
from dtrain_dagster.settings.slurm import SlurmSettings

COLUMNS = {
    "JobID": 20, "Name": 70, "State": 20, "exit_code": 12, "Reason": 80, "NodeList": 80, "SubmitTime": 24,
    "StartTime": 24, "EndTime": 24, "TimeLimit": 20,
}  # fmt: skip
"""The fields that squeue is asked for, with their widths. Text with explicit widths is what all versions agree on."""
TIMES = {"SLURM_TIME_FORMAT": "%s"}
"""Has all commands print times as Unix seconds."""
PERSONAL = ("SQUEUE_", "SBATCH_", "SCANCEL_", "SINFO_", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN")
"""The beginnings of variables by which a person changes what SLURM's commands do and print; SLURM_CONF is kept."""
EXPORTED = "PATH,HOME,USER,LANG"
"""What nodes get of the submitter's environment; of two such options sbatch takes the last, a person's own."""
END_SECONDS = 60
"""Seconds before the time limit at which the agent is told that it comes."""


def submit(
    options: SlurmSettings,
    launch: Mapping[str, Any],
    node_id: int,
    incarnation: int,
    output: str,
    excluded: Sequence[str] = (),
) -> list[str]:
    """Return the command that submits the script of one incarnation of a node, which it reads from its input.
    ``excluded``: the machines on which it is not placed, beside those of a person's own ``--exclude``."""
    own = [word for word in options.extra if word.startswith("--exclude=")]
    left_out = [*(word.partition("=")[2] for word in own), *excluded]
    chosen = {
        "partition": options.partition,
        "mem": f"{round(options.memory_gib * 1024)}M" if options.memory_gib else None,
        "time": options.time_limit_minutes,
        "gres": f"gpu:{options.gpus}" if options.gpus else None,
        "exclude": ",".join(left_out) or None,
    }
    return [
        *("sbatch", "--parsable", "--no-requeue", "--nodes=1", "--ntasks=1", f"--cpus-per-task={options.cpus}"),
        f"--job-name={name_job(launch, node_id, incarnation)}",
        f"--export={EXPORTED}",
        # The batch script is the agent: it gets the signal before the limit, and the ranks get it from the agent.
        f"--signal=B:TERM@{END_SECONDS}",
        *(f"--output={output}", "--open-mode=append", "--input=/dev/null"),
        *(f"--{name}={value}" for name, value in chosen.items() if value is not None),
        *(word for word in options.extra if word not in own),
    ]


def script(options: SlurmSettings, command: Sequence[str]) -> str:
    """Return the batch script of a node. The shell becomes the agent, so that signals reach it."""
    setup = f"{options.setup}\n" if options.setup else ""
    return f"#!/bin/sh\n{setup}exec {shlex.join(command)}\n"


def list_all(name: str | None = None) -> list[str]:
    """Return the command that lists this user's jobs in all states; with ``name``, those of that name."""
    fields = ",".join(f"{field}:{width}" for field, width in COLUMNS.items())
    return ["squeue", "--me", "--noheader", "--states=all", f"--Format={fields}", *([f"--name={name}"] if name else [])]


def end(ids: Sequence[str], force: bool) -> list[list[str]]:
    """Return the commands that end these jobs: waiting ones at once, running ones by SIGTERM to the agent, which ends
    its ranks in order; with ``force``, all at once."""
    if force:
        return [["scancel", "--signal=KILL", "--full", *ids], ["scancel", *ids]]
    return [["scancel", "--state=PENDING", *ids], ["scancel", "--batch", "--signal=TERM", "--state=RUNNING", *ids]]


def remote(host: str, socket: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs another one on a login node, over one connection that is kept for a minute. ssh asks
    nobody anything, and what a person's profile there says to SLURM's commands does not count. ``socket``: where that
    connection waits."""
    names = "|".join(PERSONAL)
    forget = f"unset $(env | sed -nE 's/^(({names})[A-Z0-9_]*)=.*/\\1/p') NONE"
    run = ["env", *(f"{name}={value}" for name, value in TIMES.items()), *command]
    line = shlex.join(["sh", "-c", f'{forget}; exec "$@"', "sh", *run])
    shared = ("ControlMaster=auto", f"ControlPath={socket}", "ControlPersist=60")
    quiet = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15")
    options = [word for option in (*shared, *quiet) for word in ("-o", option)]
    return ["ssh", *options, host, line]
