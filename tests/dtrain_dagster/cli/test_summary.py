"""The summary of a training, for reports that lack what most have."""

from __future__ import annotations

from pathlib import Path

from dtrain_dagster.cli.facts import summary_lines
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
