"""What a search writes to a real MLflow, in SQLite."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain_dagster.search.tracking import SearchTracker
from dtrain_dagster.search.trials import Trial, TrialState
from harness.tables import copy_tables


@pytest.mark.slow
def test_a_search_asks_a_dead_mlflow_once_a_minute_and_writes_all_in_the_end(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    database = tmp_path / "mlflow.db"
    copy_tables(database)
    uri = f"sqlite:///{database}"
    tracker = SearchTracker(uri, "e", "small", "nll", 1.0)
    values, done = {"lr": 0.1}, TrialState.COMPLETE
    trials = [Trial(number=0, of=1, values=values, state=done, scores=(2.0,), steps=(1,), times=(1.0,))]
    whole = database.read_bytes()
    database.write_bytes(b"this is no database")
    assert "the search cannot be written to MLflow now" in tracker.write(trials)
    database.write_bytes(whole)
    assert tracker.write(trials) == ""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("e")
    assert experiment is not None
    runs = lambda: {run.info.run_name: run.info.status for run in client.search_runs([experiment.experiment_id])}  # noqa: E731
    assert runs() == {"small": "RUNNING"}, "nobody was asked within the minute"
    assert tracker.write(trials, total_usd=0.5) == ""
    assert runs() == {"small": "FINISHED", "small-0000": "FINISHED"}
