"""The protocol of a model registry: MLflow by default, an Azure ML workspace in production."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dtrain_dagster.jobs.orders import Order
from dtrain_dagster.registry.promotion import AliasDecision, Comparison
from dtrain_dagster.registry.server import ServingCheck
from dtrain_dagster.registry.versions import RegisteredModel


class Registry(Protocol):
    """A registry that takes the run directory of a succeeded job to a version that serves, and to its alias."""

    @property
    def tracking_uri(self) -> str:
        """The address to which trainings report, for ``tracking.mlflow_tracking_uri`` of a job."""
        ...

    def try_out(self, model_name: str, experiment: str) -> None:
        """Try what registration will need, but for a version. Raise `RegistryError` where it would fail."""
        ...

    def register_model(
        self,
        run_dir: str,
        model_name: str,
        tags: Mapping[str, str],
        card: str,
        *,
        experiment: str,
        cache_dir: str | None,
        order: Order | None = None,
    ) -> RegisteredModel:
        """Register the model of a succeeded job, once; see `versions.register_model`."""
        ...

    def check_serving(
        self, run_dir: str, model: RegisteredModel, *, cache_dir: str | None, order: Order | None = None
    ) -> ServingCheck:
        """Serve the version, as the registry gives it out, on this machine, and compare its answers; see
        `server.check_serving`."""
        ...

    def judge_champion(
        self, run_dir: str, candidate: RegisteredModel, *, cache_dir: str | None, order: Order | None = None
    ) -> Comparison | None:
        """Score the current champion on the candidate's test windows; see `promotion.judge_champion`."""
        ...

    def promote(self, model: RegisteredModel, decision: AliasDecision) -> str | None:
        """Give the version its alias; return the former champion's version where this one takes its place, else
        None."""
        ...
