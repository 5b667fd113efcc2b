"""What is known of a job's data before any node is asked for: its kind, its samples, and what models are made for.

A dataset with a manifest is not opened for it. One that a function of the user's own makes is made once, in a process
of its own, as a node makes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainer.config import ConfigError, JobConfig
from trainer.data.manifest import DatasetError, describe, kind_of, load_manifest
from trainer.model.allowed_factories import refuse_foreign_factories
from trainer.performance.memory import ModelBytes
from trainer.secrets.redaction import redact
from trainer.spec import OWN, DataSpec, RowSpec
from trainer.storage.open import open_storage

MAKE_SECONDS = 600.0
"""The most seconds that a function may take to make its datasets here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobData:
    """The data of a job."""

    kind: str
    """See `trainer.spec`."""
    samples: Mapping[str, int]
    """The number of samples of each split."""
    dataset_id: str
    spec: DataSpec | RowSpec | None
    """None for a dataset of the user's own."""
    model: ModelBytes | None = None
    """The bytes of the job's model, of which a dataset of the user's own was tried; None for others."""


def data_of(job: JobConfig) -> JobData:
    """Return what is known of a job's data. Model and loss of a job on datasets of the user's own are tried on their
    first samples. Raise `DatasetError` where the data cannot be used, and `ConfigError` where one of their functions is
    not allowed, fails or does not fit."""
    if job.dataset.factory is not None:
        refuse_foreign_factories(job)
        made = _made(job.dataset.uri, json.dumps(job.dataset.args), job.to_json())
        model = ModelBytes(**made["model"])
        return JobData(kind=OWN, samples=made["samples"], dataset_id=made["dataset_id"], spec=None, model=model)
    manifest = load_manifest(open_storage(job.dataset.uri))
    try:
        kind, spec = kind_of(manifest), describe(manifest)
    except ValueError as error:
        raise DatasetError(f"{job.dataset.uri}/manifest.json: {error}") from None
    return JobData(kind=kind, samples=manifest["samples"], dataset_id=manifest["dataset_id"], spec=spec)


def samples_of(job: JobConfig) -> Mapping[str, int]:
    """Return the number of samples of each split of a job's data. Raise as `data_of` does."""
    if job.dataset.factory is not None:
        return data_of(job).samples
    samples: Mapping[str, int] = load_manifest(open_storage(job.dataset.uri))["samples"]
    return samples


@lru_cache(maxsize=8)
def _made(uri: str, args: str, text: str) -> dict[str, Any]:
    """Return what a job on the datasets of a function is, from a process of its own."""
    with tempfile.TemporaryDirectory(prefix="dtrain-dataset-") as folder:
        path = Path(folder, "job.json")
        path.write_text(text)
        command = [sys.executable, "-m", "trainer.engine.own_problem", str(path)]
        seen = os.pathsep.join([os.environ.get("PYTHONPATH", ""), os.getcwd()]).strip(os.pathsep)
        try:
            done = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": seen}, capture_output=True, text=True, timeout=MAKE_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"dataset.uri = {uri!r} made no dataset here within {MAKE_SECONDS:.0f} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()[-3:] or ["it said nothing"]
        raise ConfigError(redact("\n".join(said)))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
