"""The way from a finished job to a registered model that a real scoring server answers for.

`Registry.register_model` → `check_serving` → `judge_champion` → `choose_alias` → `promote`. Nothing here knows Dagster;
the tracking server and the registry are addresses.
"""

from dtrain_dagster.registry.base import Registry
from dtrain_dagster.registry.endpoint import EndpointCheck, ScoringEndpoint, ServingError, check_endpoint
from dtrain_dagster.registry.evaluated import EvaluationError, judge_again
from dtrain_dagster.registry.local import MLflowRegistry
from dtrain_dagster.registry.promotion import AliasDecision, Comparison, choose_alias
from dtrain_dagster.registry.run_model import RunModelError, ordered_job
from dtrain_dagster.registry.smoke_test import AnswerError, Candidate
from dtrain_dagster.registry.versions import (
    PACKED_TAG,
    PackedError,
    RegisteredModel,
    RegistryError,
    TrainingProvenance,
    model_card,
)
from dtrain_dagster.support.user_sources import StagingError
from trainer.evaluation.gate import Gate

__all__ = [
    "PACKED_TAG",
    "AliasDecision",
    "AnswerError",
    "Candidate",
    "Comparison",
    "EndpointCheck",
    "EvaluationError",
    "Gate",
    "MLflowRegistry",
    "PackedError",
    "RegisteredModel",
    "Registry",
    "RegistryError",
    "RunModelError",
    "ScoringEndpoint",
    "ServingError",
    "StagingError",
    "TrainingProvenance",
    "check_endpoint",
    "choose_alias",
    "judge_again",
    "model_card",
    "ordered_job",
]
