"""An MLflow server, or its SQLite file, as the `Registry`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dtrain_dagster.registry import promotion, server, versions
from dtrain_dagster.registry.promotion import Comparison, Decision
from dtrain_dagster.registry.server import ServingCheck
from dtrain_dagster.registry.versions import RegisteredModel


@dataclass(frozen=True, slots=True)
class MLflowRegistry:
    """The functions of this package for one address."""

    tracking_uri: str

    def register_model(
        self,
        run_dir: str,
        model_name: str,
        tags: Mapping[str, str],
        card: str,
        *,
        experiment: str,
        cache_dir: str | None,
    ) -> RegisteredModel:
        return versions.register_model(
            run_dir, self.tracking_uri, model_name, tags, card, experiment=experiment, cache_dir=cache_dir
        )

    def check_serving(self, run_dir: str, model: RegisteredModel, *, cache_dir: str | None) -> ServingCheck:
        return server.check_serving(run_dir, model.uri, self.tracking_uri, cache_dir=cache_dir)

    def judge_champion(self, run_dir: str, candidate: RegisteredModel, *, cache_dir: str | None) -> Comparison | None:
        return promotion.judge_champion(run_dir, candidate, self.tracking_uri, cache_dir=cache_dir)

    def promote(self, model: RegisteredModel, decision: Decision) -> str | None:
        return promotion.promote(model, decision, self.tracking_uri)
