"""The figures of rows and tokens beside their baselines', and a written text that cannot leave its block."""

from __future__ import annotations

from typing import Any

from dtrain_dagster.reports.kind_scores import compare_figures, figures_table, has_kind_scores, written_text

EVALUATION: dict[str, Any] = {
    "kind": "tokens",
    "model": {"loss": 1.98, "perplexity": 7.239, "bits_per_byte": 2.856, "samples": 1096},
    "baselines": {
        "bigram": {"loss": 2.42, "perplexity": 11.27, "bits_per_byte": 3.494},
        "unigram": {"perplexity": 22.0},
    },
    "sample": {"seed": 3, "temperature": 0.8, "prompt": "def ", "text": "f(x):\n```\n# [no](http://link)"},
}


def test_a_figure_stands_beside_that_of_each_baseline_that_has_it() -> None:
    assert has_kind_scores(EVALUATION)
    assert not has_kind_scores({"model": {"nll": -2.0}})
    found = {figure.name: (figure.model, dict(figure.baselines)) for figure in compare_figures(EVALUATION)}
    assert found == {
        "perplexity": (7.239, {"bigram": 11.27, "unigram": 22.0}),
        "bits_per_byte": (2.856, {"bigram": 3.494}),
    }


def test_the_table_has_a_row_for_each_figure_and_a_dash_where_one_is_missing() -> None:
    assert figures_table(EVALUATION).splitlines() == [
        "| | model | bigram | unigram |",
        "|---|---|---|---|",
        "| perplexity | 7.239 | 11.27 | 22 |",
        "| bits_per_byte | 2.856 | 3.494 | – |",
    ]


def test_what_the_model_has_written_stays_in_its_block() -> None:
    text = written_text(EVALUATION)
    assert text is not None
    fence = "````"  # longer than the one that the model wrote
    assert text.count(fence) == 2
    inside = text.partition(fence)[2].partition(fence)[0]
    assert inside == "\nf(x):\n```\n# [no](http://link)\n"
    assert "seed 3" in text
    assert "def " in text


def test_no_text_for_a_model_that_has_written_none() -> None:
    assert written_text({"kind": "rows", "model": {}, "baselines": {}}) is None
    assert written_text({"sample": {"ids": [1, 2]}}) is None
