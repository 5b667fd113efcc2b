"""The summary of a training, for reports that lack what most have."""

from __future__ import annotations

from pathlib import Path

from dtrain_dagster.cli.facts import summary_lines
from dtrain_dagster.costs.plan import PLAN
from trainer.rundir import EVALUATION, RESULT, RunDir


def test_data_for_training_only_have_a_note_in_place_of_figures(tmp_path: Path):
    """As `trainer.evaluation.judge.TaskJudge.report` writes it where there is neither a test nor a validation split."""
    rundir = RunDir(str(tmp_path / "mine"))
    rundir.write_json(RESULT, {"steps": 6, "world_size": 2, "train_seconds": 1.0})
    rundir.write_json(EVALUATION, {"model": {}, "baselines": {}, "notes": ["there is no test or validation split"]})
    assert summary_lines(rundir) == [
        ("job", "mine"),
        ("trained", "6 steps on 2 ranks"),
        ("took", "1 s of training"),
        ("note", "there is no test or validation split"),
    ]


def test_the_dollars_with_a_probe_are_the_total_of_the_bill(tmp_path: Path):
    """And not the sum of two figures that were rounded, which is another one in its last digit."""
    rundir = RunDir(str(tmp_path / "mine"))
    rundir.write_json(RESULT, {"steps": 6, "world_size": 2, "train_seconds": 1.0})
    rundir.write_json(EVALUATION, {"model": {}, "baselines": {}, "notes": []})
    rundir.write_json(PLAN, {"estimate": {"usd": {"expected": 0.3}}})
    bill = {"total_usd": 0.419649, "training_usd": 0.299621, "probe_usd": 0.120029, "metrics": {"total_cost_usd": 0.4}}
    rundir.write_json("reports/cost_breakdown.json", bill)
    assert "; with its probe $0.4196 (" in dict(summary_lines(rundir))["cost"]


def test_a_figure_stands_beside_that_of_each_baseline_that_has_it(tmp_path: Path):
    """Of tokens, which an older version has written."""
    rundir = RunDir(str(tmp_path / "old"))
    rundir.write_json(RESULT, {"steps": 6, "world_size": 2, "train_seconds": 1.0})
    baselines = {"bigram": {"perplexity": 11.27, "bits_per_byte": 3.494}, "unigram": {"perplexity": 22.0}}
    model = {"loss": 1.98, "perplexity": 7.239, "bits_per_byte": 2.856, "samples": 1096}
    rundir.write_json(EVALUATION, {"kind": "tokens", "model": model, "baselines": baselines, "notes": []})
    found = dict(summary_lines(rundir))
    assert found["test perplexity"] == "7.239 (bigram 11.27, unigram 22)"
    assert found["test bits_per_byte"] == "2.856 (bigram 3.494)"
