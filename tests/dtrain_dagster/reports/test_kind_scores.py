"""The figures of rows beside their baselines', and those of tokens that an older version has written."""

from __future__ import annotations

from typing import Any

from dtrain_dagster.reports.kind_scores import compare_figures, has_kind_scores

EVALUATION: dict[str, Any] = {
    "kind": "tokens",
    "model": {"loss": 1.98, "perplexity": 7.239, "bits_per_byte": 2.856, "samples": 1096},
    "baselines": {
        "bigram": {"loss": 2.42, "perplexity": 11.27, "bits_per_byte": 3.494},
        "unigram": {"perplexity": 22.0},
    },
}


def test_a_figure_stands_beside_that_of_each_baseline_that_has_it() -> None:
    assert has_kind_scores(EVALUATION)
    assert not has_kind_scores({"model": {"nll": -2.0}})
    found = {figure.name: (figure.model, dict(figure.baselines)) for figure in compare_figures(EVALUATION)}
    assert found == {
        "perplexity": (7.239, {"bigram": 11.27, "unigram": 22.0}),
        "bits_per_byte": (2.856, {"bigram": 3.494}),
    }
