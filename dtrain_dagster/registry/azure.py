"""An Azure ML workspace as the `Registry`: model versions, with tags that tell how they were trained.

Azure ML's registry knows no aliases, so ``champion`` and ``challenger`` are tags of versions. Of MLflow only runs and
metrics are used (plain REST, see `trainer.secrets.azure_token`); files of a model go to the workspace through its own
client.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.clusters.azure_ml.client import explain_refusal
from dtrain_dagster.registry.base import Registry
from dtrain_dagster.registry.promotion import AliasDecision
from dtrain_dagster.registry.versions import (
    JOB_TAG,
    PACKED_TAG,
    WEIGHTS_TAG,
    RegisteredModel,
    RegistryError,
    description,
    explained,
    open_client,
    refuse_changed_files,
    tags_of_run,
)
from dtrain_dagster.support.audit import AuditLog
from dtrain_dagster.support.secrets import redact
from trainer.observability.mlflow_sink import ensure_experiment, figures_of_test, metric_name, verdict_tags
from trainer.runtime.retry import RetryPolicy
from trainer.runtime.scratch import scratch_folder
from trainer.secrets.azure_token import tracking_address

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import Model

ALIAS_TAG, SINCE_TAG, RUN_TAG = "alias", "alias_since", "mlflow_run_id"
MAX_TAGS, MAX_KEY, MAX_VALUE = 50, 100, 1000
"""Azure ML's documented limits of tags, in characters (those of runs; limits of assets are not stated separately)."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
_NUMBER_RETRIES = RetryPolicy(first_pause_seconds=0.0, max_attempts=3)
"""The retries of taking the next version's number."""


@dataclass(frozen=True)
class AzureMLRegistry(Registry):
    """The registry of one workspace. ``client`` is an ``azure.ai.ml.MLClient``; ``audit`` records the changes made
    there."""

    client: MLClient
    audit: AuditLog

    @cached_property
    def tracking_uri(self) -> str:
        """The workspace's MLflow address, ``azureml://…``, also for the job's ``tracking`` section. Raise
        `RegistryError` without one."""
        with _explained("looking at the workspace"):
            workspace = self.client.workspaces.get(self.client.workspace_name)
        if not workspace.mlflow_tracking_uri:
            raise RegistryError(
                f"workspace {workspace.name} names no MLflow tracking address; check DTRAIN_AZURE_WORKSPACE"
            )
        return str(workspace.mlflow_tracking_uri)

    def try_out(self, model_name: str, experiment: str) -> None:
        """Look for the model and the experiment, which is made where it is missing. Whether this identity may make a
        version is seen when it does; ``dtrain doctor`` reads its roles. Raise `RegistryError` where that fails,
        or no model can have this name."""
        if not _NAME.fullmatch(model_name):
            raise RegistryError(
                f"DTRAIN_MODEL_NAME={model_name!r}: models of Azure ML have letters, digits, dots, dashes, underscores"
            )
        with _explained(f"looking for versions of {model_name}"):
            self._versions(model_name)
        with explained(f"the experiment {experiment!r} cannot be used", "experiment in DTRAIN_OPTIONS"):
            ensure_experiment(open_client(self.address), experiment, self.address)

    @property
    def address(self) -> str:
        """The address of the workspace's own MLflow server."""
        return tracking_address(self.tracking_uri)

    def find(self, model_name: str, job_id: str, weights: str | None) -> RegisteredModel | None:
        """Return the oldest version of this job or of these weights, or None."""
        with _explained(f"looking for versions of {model_name}"):
            found = [
                item
                for item in self._versions(model_name)
                if (item.tags or {}).get(JOB_TAG) == job_id
                or (weights is not None and (item.tags or {}).get(WEIGHTS_TAG) == weights)
            ]
        oldest = min(found, key=_number, default=None)
        return self._registered(oldest, created=False) if oldest is not None else None

    def publish(
        self,
        model_name: str,
        run_id: str,
        folder: Path,
        tags: Mapping[str, str],
        card: str,
        result: Mapping[str, Any],
        evaluation: Mapping[str, Any],
    ) -> RegisteredModel:
        """See `Registry`. The run gets the tags that a run has, and the figures of the test split."""
        from mlflow.entities import Metric, RunTag

        figures, now = figures_of_test(evaluation), int(time.time() * 1000)
        chosen = {"model_name": model_name, **verdict_tags(evaluation), **tags_of_run(tags)}
        open_client(self.address).log_batch(
            run_id,
            metrics=[Metric(metric_name(name, True), value, now, result["steps"]) for name, value in figures.items()],
            tags=[RunTag(name, value) for name, value in fit_tags(chosen).items()],
        )
        operation = self.audit.operation("model.register", model_name, job_id=tags[JOB_TAG])
        with _explained(f"registering {model_name}"), operation as entry:
            created = self._create(model_name, folder, fit_tags({**tags, RUN_TAG: run_id}), card)
            entry.details["version"] = str(created.version)
            first = self.find(model_name, tags[JOB_TAG], tags[WEIGHTS_TAG])
            if first is None or first.version == str(created.version):
                return self._registered(created, created=True)
            # Another process has registered the same at the same time: the older version stays.
            self.client.models.archive(name=created.name, version=created.version)
            return first

    @contextmanager
    def files(self, name: str, version: str) -> Iterator[Path]:
        """See `Registry`."""
        with scratch_folder("model") as scratch:
            with _explained(f"downloading {name} {version}"):
                self.client.models.download(name=name, version=version, download_path=str(scratch))
            found = sorted(scratch.rglob("MLmodel"), key=lambda path: len(path.parts))
            if not found:
                raise RegistryError(
                    f"{name} version {version} holds no MLmodel file: dtrain did not register it, or its files were "
                    "changed; archive it and register again"
                )
            tags = self.client.models.get(name=name, version=version).tags or {}
            refuse_changed_files(f"{name} version {version}", found[0].parent, tags.get(PACKED_TAG))
            yield found[0].parent

    def promote(self, model: RegisteredModel, decision: AliasDecision) -> str | None:
        """Tag the version, then take the alias from the former champion; return that one's version, or None. A reader
        in between, or after a crash in between, sees two champions, of which the later counts."""
        with _explained(f"tagging {model.name} {model.version} as {decision.alias}"):
            before = self.champion_version(model.name)
            tags = {ALIAS_TAG: decision.alias, "alias_reason": decision.reason, SINCE_TAG: _now()}
            self._tag(model.name, model.version, tags)
            if decision.alias != "champion" or before is None or before == model.version:
                return None
            self._tag(model.name, before, {ALIAS_TAG: "former champion"})
        return before

    def champion_version(self, model_name: str) -> str | None:
        """Return the champion's version, or None."""
        champions = [item for item in self._versions(model_name) if (item.tags or {}).get(ALIAS_TAG) == "champion"]
        newest = max(champions, key=lambda item: ((item.tags or {}).get(SINCE_TAG, ""), _number(item)), default=None)
        return str(newest.version) if newest is not None else None

    def _versions(self, model_name: str) -> list[Model]:
        """Return all versions that are not archived; none where the model is new."""
        from azure.core.exceptions import ResourceNotFoundError

        try:
            return list(self.client.models.list(name=model_name))
        except ResourceNotFoundError:
            return []

    def _create(self, model_name: str, folder: Path, tags: Mapping[str, str], card: str) -> Model:
        """Create the next free version. The client takes the number before it uploads, so another process may have used
        it by then."""
        from azure.ai.ml.entities import Model
        from azure.ai.ml.exceptions import AssetPathException
        from azure.core.exceptions import ResourceExistsError

        def create() -> Model:
            model = Model(
                name=model_name,
                path=str(folder),
                type="mlflow_model",
                tags=dict(tags),
                description=description(card),
            )
            return self.client.models.create_or_update(model)

        was_taken = (AssetPathException, ResourceExistsError)
        return _NUMBER_RETRIES.call(f"a version of {model_name}", create, lambda error: isinstance(error, was_taken))

    def _registered(self, model: Model, created: bool) -> RegisteredModel:
        tags = {name: str(value) for name, value in (model.tags or {}).items()}
        return RegisteredModel(
            name=str(model.name),
            version=str(model.version),
            run_id=tags.get(RUN_TAG, ""),
            created=created,
            tags=tags,
            asset_uri=f"azureml:{model.name}:{model.version}",
        )

    def _tag(self, name: str, version: str, tags: Mapping[str, str]) -> None:
        model = self.client.models.get(name=name, version=version)
        model.tags = fit_tags({**(model.tags or {}), **tags})
        with self.audit.operation("model.tag", f"{name}:{version}", alias=tags[ALIAS_TAG]):
            self.client.models.create_or_update(model)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Within the block, turn the service's refusals into `RegistryError`, with its words and the remedy."""
    from azure.ai.ml.exceptions import MlException
    from azure.core.exceptions import AzureError

    try:
        yield
    except (AzureError, MlException) as error:
        raise RegistryError(str(explain_refusal(what, error))) from error


def fit_tags(tags: Mapping[str, Any]) -> dict[str, str]:
    """Return tags within Azure's limits: values that are too long end with ``…``, known secrets are removed, empty
    values left out. Raise `RegistryError` for too many tags or a name that is too long: those must not vanish."""
    fitted = {name: redact(str(value)) for name, value in tags.items() if value not in (None, "")}
    long = [name for name in fitted if len(name) > MAX_KEY]
    if long or len(fitted) > MAX_TAGS:
        raise RegistryError(
            f"{len(fitted)} tags, {len(long)} of them with names of more than {MAX_KEY} characters: Azure ML takes "
            f"{MAX_TAGS}; leave some out of the job's tracking.tags"
        )
    return {name: value if len(value) <= MAX_VALUE else value[: MAX_VALUE - 1] + "…" for name, value in fitted.items()}


def _number(model: Model) -> int:
    return int(str(model.version))


def _now() -> str:
    """Return the time as sortable text, to the microsecond."""
    return f"{time.time():017.6f}"
