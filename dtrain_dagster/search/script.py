"""The trials of a script: which arguments and fields each of them has, and the job that follows.

    {"training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": true},
     "args.width": [32, 64, 128]}

A trial of width 64 runs the script with ``--width 64`` behind its own arguments. The script is run up to its call of
``fit`` with them, so that what it makes of them is what is ordered: settings that follow from its arguments included.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from dtrain_dagster.jobs.script_job import ScriptJob, describe_script
from dtrain_dagster.search.space import ARGUMENT, Value, job_of_trial
from trainer.config import JobConfig
from trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchedScript:
    """A script whose trainings are searched."""

    path: str
    """The file, as it was named."""
    arguments: tuple[str, ...]
    """Its own arguments, those of every trial."""
    overrides: tuple[str, ...]
    """Fields of ``job.json`` for every trial, as ``--set`` takes them."""
    digest: str
    """What tells versions of the script apart."""

    def described(self) -> dict[str, object]:
        """Return what decides which trainings its trials are."""
        return {"arguments": list(self.arguments), "digest": self.digest}

    def job_of(self, base: JobConfig, values: Mapping[str, Value], source: str) -> JobConfig:
        """Return the job of a trial, with the name and the tracking of ``base``. Raise `ConfigError` for values with
        which the script does not come to its call of fit, or trains on other data."""
        own = arguments_of(values)
        if not own:
            return job_of_trial(base, values, source)
        place = f"{base.run_dir.rpartition('/')[0]}/described"  # where there is no checkpoint of another training
        found = _described(self.path, (*self.arguments, *own), self.overrides, place).job
        if found.dataset.dataset_id != base.dataset.dataset_id:
            raise ConfigError(
                f"{source}: with {' '.join(own)} the script trains on other data ({found.dataset.dataset_id}, not "
                f"{base.dataset.dataset_id}): trials are compared on the same samples; vary what does not change them, "
                "or give Trainer(…, name=…) if the samples are equal nevertheless"
            )
        of_cluster = {name: getattr(base.training, name) for name in ("world_size", "threads_per_rank")}
        training = replace(found.training, **of_cluster)
        found = replace(found, job_id=base.job_id, run_dir=base.run_dir, tracking=base.tracking, training=training)
        return job_of_trial(found, values, source)

    def command(self, values: Mapping[str, Value]) -> tuple[str, ...]:
        """Return what each process of a trial runs."""
        return (sys.executable, self.path, *self.arguments, *arguments_of(values))

    def words(self, values: Mapping[str, Value]) -> str:
        """Return the command of a shell that trains with these values."""
        drawn = {name: value for name, value in values.items() if not name.startswith(ARGUMENT)}
        asked = [*self.overrides, *(f"{name}={json.dumps(value)}" for name, value in drawn.items())]
        own = [*self.arguments, *arguments_of(values)]
        sets = [word for item in asked for word in ("--set", item)]
        return shlex.join(["dtrain", "train", "--script", self.path, *sets, *(["--", *own] if own else [])])


def arguments_of(values: Mapping[str, Value]) -> tuple[str, ...]:
    """Return the arguments of a script for the values of a trial: ``--NAME VALUE``, with several for a list; as flags
    are given, ``--NAME`` alone for true, and nothing for false and None. Pure."""
    found: list[str] = []
    for name, value in values.items():
        if not name.startswith(ARGUMENT) or value is False or value is None:
            continue
        given = [] if value is True else value if isinstance(value, list | tuple) else [value]
        found += [f"--{name.removeprefix(ARGUMENT)}", *map(str, given)]
    return tuple(found)


@lru_cache(maxsize=256)
def _described(path: str, arguments: tuple[str, ...], overrides: tuple[str, ...], run_dir: str) -> ScriptJob:
    return describe_script(path, arguments, overrides, "described", run_dir, option="--script")
