"""The rule that one job becomes one version, however often and by however many processes it is registered.

This module decides which process may register, and which version of a training counts.
`dtrain_dagster.registry.versions` makes the version.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainer.rundir import RunDir
from trainer.runtime.file_lock import hold_lock

if TYPE_CHECKING:
    from mlflow import MlflowClient

JOB_TAG = "job_id"
WEIGHTS_TAG = "weights_sha256"
LOCK = "registration.lock"
PATIENCE_SECONDS = 600.0
"""The longest wait for another registration. One that takes longer is frozen; of two versions, the older one stays."""


@contextmanager
def registering(rundir: RunDir) -> Iterator[None]:
    """Keep other processes of this machine from registering the job within the block. The lock ends with its process,
    however that ends. A run directory in the cloud has no lock: there the older of two versions stays, see `older`."""
    if not rundir.storage.is_local:
        yield
        return
    with hold_lock(rundir.storage.local_path(LOCK), PATIENCE_SECONDS):
        yield


def is_same(tags: dict[str, str], job_id: str, weights: str | None) -> bool:
    """Return whether a version with these tags is of this job and of these weights. A version without a record of its
    weights (an older one), and a call without weights, match on the job alone."""
    return tags.get(JOB_TAG) == job_id and (weights is None or tags.get(WEIGHTS_TAG, weights) == weights)


def older(client: MlflowClient, model_name: str, version: str, job_id: str, weights: str | None) -> str | None:
    """Return the first version of the same training where another process made one at the same time, and delete
    ``version``, the second. Return None where ``version`` is the first."""
    numbers = [
        int(item.version)
        for item in client.search_model_versions(f"name = '{model_name}'")
        if is_same(dict(item.tags), job_id, weights)
    ]
    first = min(numbers, default=int(version))
    if first >= int(version):
        return None
    client.delete_model_version(model_name, version)
    return str(first)
