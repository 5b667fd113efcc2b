"""One job becomes one version, whoever registers it, how often, and however many at the same time.

Here is who may register, and which of the versions of one training counts. How a version is made is in
`dtrain_dagster.registry.versions`.
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
"""Whoever registers for longer is frozen, and not waited for: of two versions, the older one stays."""


@contextmanager
def registering(rundir: RunDir) -> Iterator[None]:
    """Within, no other process of this machine registers the job. It ends with its process, however that ends. A run
    directory in the cloud has none: there the older of two versions stays, see `older`."""
    if not rundir.storage.is_local:
        yield
        return
    with hold_lock(rundir.storage.local_path(LOCK), PATIENCE_SECONDS):
        yield


def is_same(tags: dict[str, str], job_id: str, weights: str | None) -> bool:
    """Is a version with these tags of this job and of these weights? A version that does not say which weights it has
    (an older one), and a question that names none, are of the job."""
    return tags.get(JOB_TAG) == job_id and (weights is None or tags.get(WEIGHTS_TAG, weights) == weights)


def older(client: MlflowClient, model_name: str, version: str, job_id: str, weights: str | None) -> str | None:
    """The first version of the same training where another was made at the same time; ``version``, made second, is
    then deleted. None where it is the first."""
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
