"""The training of a script that calls `trainer.Trainer.fit`: found out by running the script up to that call.

Starting it belongs to `jobs.start`, and what a command or an asset makes of it to these.
"""

from __future__ import annotations

import hashlib
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
from typing import Any

import trainer
from dtrain_dagster.support.user_code import digest_sources
from dtrain_dagster.support.user_sources import script_sources
from trainer.config import ConfigError, JobConfig, parse_job
from trainer.performance.memory import ModelBytes
from trainer.runtime.launch import LAUNCH_VARIABLE, ORDER, with_order

DESCRIBE_SECONDS = 600.0
"""The most seconds that a script may take until it calls fit: it reads its data before."""
_PLACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_OURS = f"{Path(trainer.__file__ or '').parent}{os.sep}"
_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", LAUNCH_VARIABLE, ORDER)


@dataclass(frozen=True, slots=True)
class ScriptJob:
    """A script's training."""

    job: JobConfig
    command: tuple[str, ...]
    samples: Mapping[str, int]
    """The number of samples of each split."""
    model: ModelBytes | None = None
    """The bytes of its model; None if they are not known."""

    @property
    def digest(self) -> str:
        """Twelve hex digits over its source, the modules of the user that it imports, and its arguments."""
        sources = digest_sources(script_sources(Path(self.command[1])))
        return hashlib.sha256(json.dumps([sources, *self.command[2:]]).encode()).hexdigest()[:12]

    def document(self) -> dict[str, Any]:
        """Return what a plan keeps of it, in JSON's types."""
        return {"command": list(self.command), "samples": dict(self.samples)}


def describe_script(
    script: str,
    arguments: Sequence[str],
    overrides: Sequence[str],
    job_id: str,
    run_dir: str,
    environment: Mapping[str, str] | None = None,
    option: str = "script",
) -> ScriptJob:
    """Return the training of a script, which is run up to its call of fit: data, model, loss and settings are checked
    before any node is asked for. ``environment``: variables beside this process's own; ``option``: what has named the
    script. Raise `ConfigError`, which says in one line where and why, if it does not get there."""
    path = Path(script).resolve()
    if not path.is_file():
        raise ConfigError(f"{option} {script}: there is no such file in {os.getcwd()}")
    command = (sys.executable, str(path), *arguments)
    with tempfile.TemporaryDirectory(prefix="dtrain-script-") as folder:
        answer = Path(folder, "job.json")
        own = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
        asked = [*overrides, f"run_dir={json.dumps(run_dir)}"]  # whose checkpoints are looked at
        own |= with_order(environment or {}, describe=str(answer), overrides=tuple(asked))
        try:
            done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=DESCRIBE_SECONDS)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"{option} {script} did not call Trainer(…).fit(…) within {DESCRIBE_SECONDS:.0f} s"
            ) from None
        found = json.loads(answer.read_text()) if answer.is_file() else {}
    if "job" not in found:
        raise ConfigError(f"{option} {script}: {found.get('error') or explain_end(done.returncode, done.stderr)}")
    job = parse_job(json.dumps(found["job"] | {"job_id": job_id, "run_dir": run_dir}), source=script)
    return ScriptJob(job, command, found["samples"], ModelBytes(**found["model"]) if found.get("model") else None)


def explain_end(code: int, said: str) -> str:
    """Return why a script ended before it called fit, in one line, by its exit code and standard error. Pure."""
    if code == 0:
        return "it ended without calling Trainer(…).fit(…) (is the call behind a condition, or in a function?)"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not lines:
        return f"it ended with exit code {code} before it trained, and printed nothing"
    places = [found for line in lines if (found := _PLACE.match(line)) and not _is_installed(found["file"])]
    where = f" ({places[-1]['file']}, line {places[-1]['line']})" if places else ""
    _, is_refused, refusal = said.rpartition("\ntrainer.errors.ConfigError: ")
    if is_refused:
        return "; ".join(refusal.strip().split("\n")) + where
    return f"it ended with exit code {code} before it trained: {lines[-1]}{where}"


def _is_installed(file: str) -> bool:
    """Return whether a file of a stack trace is none of the script's author's."""
    return file.startswith("<") or "site-packages" in file or file.startswith((_OURS, _PYTHON))
