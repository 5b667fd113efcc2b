"""An MLflow server, or its SQLite file, as the `Registry`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dtrain_dagster.jobs.orders import Order
from dtrain_dagster.registry import promotion, server, trial, versions
from dtrain_dagster.registry.promotion import AliasDecision, Comparison
from dtrain_dagster.registry.server import ServingCheck
from dtrain_dagster.registry.versions import RegisteredModel
from dtrain_dagster.support.secrets import redact
from trainer.observability.mlflow_sqlite import authorised


@dataclass(frozen=True, slots=True)
class MLflowRegistry:
    """The registry at one MLflow address; it calls the functions of this package."""

    tracking_uri: str
    """The address as it was set; a reference to a secret is resolved in each call, and stored as a reference."""

    def try_out(self, model_name: str, experiment: str) -> None:
        """Try what registration will need; see `trial.try_registry`."""
        trial.try_registry(authorised(self.tracking_uri), model_name, experiment)

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
        """Register the model of a succeeded job, once, without secrets in its tags and card; see
        `versions.register_model`."""
        return versions.register_model(
            run_dir,
            authorised(self.tracking_uri),
            model_name,
            redact(tags),
            redact(card),
            experiment=experiment,
            cache_dir=cache_dir,
            order=order,
        )

    def check_serving(
        self, run_dir: str, model: RegisteredModel, *, cache_dir: str | None, order: Order | None = None
    ) -> ServingCheck:
        """Serve the version on this machine and compare its answers; see `server.check_serving`."""
        return server.check_serving(run_dir, model.uri, authorised(self.tracking_uri), cache_dir=cache_dir, order=order)

    def judge_champion(
        self, run_dir: str, candidate: RegisteredModel, *, cache_dir: str | None, order: Order | None = None
    ) -> Comparison | None:
        """Score the current champion on the candidate's test windows; see `promotion.judge_champion`."""
        return promotion.judge_champion(
            run_dir, candidate, authorised(self.tracking_uri), cache_dir=cache_dir, order=order
        )

    def promote(self, model: RegisteredModel, decision: AliasDecision) -> str | None:
        """Give the version its alias; see `promotion.promote`."""
        return promotion.promote(model, decision, authorised(self.tracking_uri))
