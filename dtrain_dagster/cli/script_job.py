"""The job of a script that calls `trainer.Trainer.fit`: found out by running the script up to that call, and then run
on the cluster.

A job of ``job.json``, without a script, is `dtrain_dagster.cli.train`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trainer
from dtrain_dagster.cli.common import Refusal, cluster_of, console, ranks_of, run_dir, say
from dtrain_dagster.cli.job_life import (
    announce,
    cancelled_by_signals,
    end,
    new_job_id,
    runs_already,
    say_what_was_got,
    take_over,
)
from trainer.config import ConfigError, JobConfig, parse_job
from trainer.data.sampler import steps_per_epoch

if TYPE_CHECKING:
    from dtrain_dagster.settings.environment import Settings

DESCRIBE_SECONDS = 600.0
"""The most seconds that a script may take until it calls fit: it reads its data before."""
_PLACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_OURS = f"{Path(trainer.__file__ or '').parent}{os.sep}"
_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "DTRAIN_LAUNCH", "DTRAIN_RUN_DIR")


@dataclass(frozen=True, slots=True)
class ScriptJob:
    """A script's training."""

    job: JobConfig
    command: tuple[str, ...]
    samples: Mapping[str, int]
    """The number of samples of each split."""

    @property
    def total_steps(self) -> int:
        """The optimizer steps of the training."""
        training = self.job.training
        steps = training.epochs * steps_per_epoch(
            self.samples["train"], training.global_batch_size, training.micro_batches
        )
        return steps if training.max_steps is None else min(steps, training.max_steps)


def describe_script(
    script: str, arguments: Sequence[str], overrides: Sequence[str], job_id: str, run_dir: str
) -> ScriptJob:
    """Return the training of a script, which is run up to its call of fit: data, model, loss and settings are checked
    before any node is asked for. Raise `ConfigError`, which says in one line where and why, if it does not get
    there."""
    path = Path(script).resolve()
    if not path.is_file():
        raise ConfigError(f"--script {script}: there is no such file in {os.getcwd()}")
    command = (sys.executable, str(path), *arguments)
    with tempfile.TemporaryDirectory(prefix="dtrain-script-") as folder:
        answer = Path(folder, "job.json")
        environment = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
        environment |= {"DTRAIN_DESCRIBE_JOB": str(answer), "DTRAIN_SET": json.dumps(list(overrides))}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DESCRIBE_SECONDS)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"--script {script} did not call Trainer(…).fit(…) within {DESCRIBE_SECONDS:.0f} s"
            ) from None
        found = json.loads(answer.read_text()) if answer.is_file() else {}
    if "job" not in found:
        raise ConfigError(f"--script {script}: {found.get('error') or explain_end(done.returncode, done.stderr)}")
    job = parse_job(json.dumps(found["job"] | {"job_id": job_id, "run_dir": run_dir}), source=script)
    return ScriptJob(job, command, found["samples"])


def explain_end(code: int, said: str) -> str:
    """Return why a script ended before it called fit, in one line, from its exit code and what it wrote to standard
    error: the error that it raised, and the innermost place in its own files. Pure."""
    if code == 0:
        return "it ended without calling Trainer(…).fit(…) (is the call behind a condition, or in a function?)"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not lines:
        return f"it ended with exit code {code} before it trained, and said nothing"
    places = [found for line in lines if (found := _PLACE.match(line)) and not _is_installed(found["file"])]
    where = f" ({places[-1]['file']}, line {places[-1]['line']})" if places else ""
    last = re.sub(r"^trainer\.errors\.ConfigError: ", "", lines[-1])
    return f"it ended with exit code {code} before it trained: {last}{where}"


def _is_installed(file: str) -> bool:
    """Return whether a file of a stack trace is none of the script's author's."""
    return file.startswith("<") or "site-packages" in file or file.startswith((_OURS, _PYTHON))


def refuse_with_script(options: Mapping[str, object]) -> None:
    """Raise `Refusal` for options of a job that a script has itself."""
    for option, value in options.items():
        if value is not None:
            raise Refusal(f"{option} does not go with --script: the script has its own model, loss, data and settings")


def order_script(
    settings: Settings, script: str, arguments: Sequence[str], overrides: Sequence[str], nodes: int | None,
    name: str | None,
) -> ScriptJob:  # fmt: skip
    """Return the training of a script on this many nodes. Raise `ConfigError` as `describe_script` does."""
    if settings.kind.code != "in place" and not settings.kind.is_this_machine:
        say("note: the script and what it imports must be at the same path on the nodes", err=True)
    job_id = new_job_id(name, "train")
    ranks = (nodes or settings.nodes) * ranks_of(settings)
    share = max(1, (os.cpu_count() or 1) // ranks) if settings.kind.is_this_machine else None
    threads = settings.threads_per_rank or share
    own = [f"training.world_size={ranks}", *([f"training.threads_per_rank={threads}"] if threads else [])]
    return describe_script(script, arguments, [*own, *overrides], job_id, f"{settings.jobs_uri}/{job_id}")


def train_script(settings: Settings, ordered: ScriptJob, node_count: int, detach: bool) -> None:
    """Run a script's training on the cluster, follow it, and exit as it ends."""
    from dtrain_dagster.cli.job_options import as_begun
    from dtrain_dagster.cli.terminal import watch_training
    from dtrain_dagster.jobs.progress import start_job

    cluster, project = cluster_of(settings)
    manager = cluster.manager(tends=True)
    rundir, job_id = run_dir(settings, ordered.job.job_id), ordered.job.job_id
    runs = runs_already(manager, job_id)
    job = as_begun(ordered.job, runs)
    if runs:
        say(f"job {job_id} is running already: no other is started", err=True)
    else:
        say_what_was_got(manager.provision_cluster(node_count, cluster.sku), cluster.sku)
    take_over(rundir)
    environment = cluster.node_env(project) | {"DTRAIN_RUN_DIR": rundir.uri}
    with cancelled_by_signals(manager, job_id, unless=detach):
        start_job(manager, job, node_count, ranks_of(settings), environment, command=ordered.command)
        if detach:
            say(job_id)
            return
        announce(rundir)
        status = watch_training(console(), manager, rundir, job_id, ordered.total_steps)
    end(rundir, status)
