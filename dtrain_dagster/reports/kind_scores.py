"""The test figures of a model of rows beside its baselines'. Pure.

Pages of assets and the terminal show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.spec import WINDOWS

FIGURES = ("log_loss", "rmse", "accuracy", "ece", "r2", "perplexity", "bits_per_byte")
"""The figures that people compare, as far as a kind has them; the first is the one that it is judged by."""


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """A figure of a model on the test split, and the same one of each baseline that has it."""

    name: str
    model: float
    baselines: Mapping[str, float]


def has_kind_scores(evaluation: Mapping[str, Any]) -> bool:
    """Return whether an ``evaluation.json`` is of rows, or of the tokens that older versions had."""
    return evaluation.get("kind", WINDOWS) != WINDOWS


def compare_figures(evaluation: Mapping[str, Any]) -> list[ComparedFigure]:
    """Return the figures of an ``evaluation.json`` of rows, in the order of `FIGURES`."""
    model, baselines = evaluation["model"], evaluation["baselines"]
    found = []
    for name in FIGURES:
        if model.get(name) is not None:
            others = {key: row[name] for key, row in baselines.items() if row.get(name) is not None}
            found.append(ComparedFigure(name, model[name], others))
    return found
