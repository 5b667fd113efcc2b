"""The test figures of a model of rows or tokens beside its baselines', and a text that it has written. Pure.

Pages of assets and the terminal show them. The figures of windows of prices have charts instead: `training_charts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtrain_dagster.support.formatting import in_block
from trainer.spec import ROWS, TOKENS

FIGURES = ("log_loss", "rmse", "accuracy", "ece", "r2", "perplexity", "bits_per_byte")
"""The figures that people compare, as far as a kind has them; the first is the one that it is judged by."""


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """A figure of a model on the test split, and the same one of each baseline that has it."""

    name: str
    model: float
    baselines: Mapping[str, float]


def has_kind_scores(evaluation: Mapping[str, Any]) -> bool:
    """Return whether an ``evaluation.json`` is of rows or tokens."""
    return evaluation.get("kind") in (ROWS, TOKENS)


def compare_figures(evaluation: Mapping[str, Any]) -> list[ComparedFigure]:
    """Return the figures of an ``evaluation.json`` of rows or tokens, in the order of `FIGURES`."""
    model, baselines = evaluation["model"], evaluation["baselines"]
    found = []
    for name in FIGURES:
        if model.get(name) is not None:
            others = {key: row[name] for key, row in baselines.items() if row.get(name) is not None}
            found.append(ComparedFigure(name, model[name], others))
    return found


def figures_table(evaluation: Mapping[str, Any]) -> str:
    """Return the figures as a Markdown table: a row for each, and a column for the model and for each baseline."""
    others = list(evaluation["baselines"])
    lines = [f"| | {' | '.join(['model', *others])} |", "|---" * (len(others) + 2) + "|"]
    for figure in compare_figures(evaluation):
        cells = [f"{value:.4g}" if (value := figure.baselines.get(name)) is not None else "–" for name in others]
        lines.append(f"| {figure.name} | {' | '.join([f'{figure.model:.4g}', *cells])} |")
    return "\n".join(lines)


def written_text(evaluation: Mapping[str, Any]) -> str | None:
    """Return the text that a model of bytes has written as Markdown, after that of the test split with which it began;
    None for a model that has written none."""
    sample = evaluation.get("sample") or {}
    if not sample.get("text"):
        return None
    seed, temperature = sample["seed"], sample["temperature"]
    return (
        f"After these characters of the test split:\n\n{in_block(sample['prompt'])}\n\nthe model has written (seed "
        f"{seed}, temperature {temperature:g}):\n\n{in_block(sample['text'])}"
    )
