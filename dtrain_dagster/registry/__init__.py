"""The way from a finished job to a registered model that a real scoring server answers for.

`register_model` → `check_serving` → `judge_champion` → `choose_alias` → `promote`. Nothing here knows Dagster; the
tracking server and the registry are addresses.
"""

from dtrain_dagster.registry.base import Registry
from dtrain_dagster.registry.card import TrainingProvenance, model_card
from dtrain_dagster.registry.endpoint import EndpointCheck, ScoringEndpoint, check_endpoint
from dtrain_dagster.registry.evaluated import EvaluationError, refuse_false_evaluation
from dtrain_dagster.registry.evaluated_rows import judge_rows
from dtrain_dagster.registry.local import MLflowRegistry
from dtrain_dagster.registry.packed import PACKED_TAG, PackedError
from dtrain_dagster.registry.promotion import (
    AliasDecision,
    Comparison,
    champion_version,
    choose_alias,
    judge_champion,
    promote,
)
from dtrain_dagster.registry.run_model import RunModelError, ordered_job
from dtrain_dagster.registry.server import (
    ScoringServer,
    ServingCheck,
    ServingError,
    check_answers,
    check_serving,
    scoring_server,
)
from dtrain_dagster.registry.smoke_test import AnswerError
from dtrain_dagster.registry.versions import RegisteredModel, RegistryError, find_version, register_model
from dtrain_dagster.support.user_sources import StagingError
from trainer.evaluation.gate import Gate

__all__ = [
    "PACKED_TAG",
    "AliasDecision",
    "AnswerError",
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
    "ScoringServer",
    "ServingCheck",
    "ServingError",
    "StagingError",
    "TrainingProvenance",
    "champion_version",
    "check_answers",
    "check_endpoint",
    "check_serving",
    "choose_alias",
    "find_version",
    "judge_champion",
    "judge_rows",
    "model_card",
    "ordered_job",
    "promote",
    "refuse_false_evaluation",
    "register_model",
    "scoring_server",
]
