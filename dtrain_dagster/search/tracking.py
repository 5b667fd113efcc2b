"""A search in MLflow: a parent run, and a run nested in it for each trial that has ended, with its values, its curve
and its dollars. Written by the orchestrator, so that nodes need no way to MLflow and load nothing for it.

A run is found by its tags: who writes the same search again adds what is missing, and nothing twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dtrain_dagster.registry.client import open_client
from dtrain_dagster.search.trials import Trial, TrialState, best_trial
from trainer.observability.mlflow_sink import ensure_experiment
from trainer.observability.mlflow_sqlite import authorised

if TYPE_CHECKING:
    from mlflow import MlflowClient

SEARCH_TAG, TRIAL_TAG, PARENT_TAG = "dtrain.search", "dtrain.trial", "mlflow.parentRunId"
MOST_LENGTH = 500
"""Characters of a value that MLflow takes."""


class SearchTracker:
    """Writes one search to MLflow."""

    def __init__(self, tracking_uri: str, experiment: str, name: str, metric: str, sign: float) -> None:
        """Find or begin the parent run. Raise as MLflow does where it cannot be reached."""
        uri = authorised(tracking_uri)
        self._client: MlflowClient = open_client(uri)
        self._name, self._metric, self._sign = name, metric, sign
        self._experiment = ensure_experiment(self._client, experiment, uri)
        runs = self._client.search_runs([self._experiment], f"tags.`{SEARCH_TAG}` = '{name}'", max_results=50_000)
        parents = [run for run in runs if TRIAL_TAG not in run.data.tags]
        self._done = {
            int(run.data.tags[TRIAL_TAG]) for run in runs if TRIAL_TAG in run.data.tags and run.info.status != "RUNNING"
        }
        self._begun = {int(run.data.tags[TRIAL_TAG]): run for run in runs if TRIAL_TAG in run.data.tags}
        if parents:
            self.run_id: str = parents[0].info.run_id
        else:
            self.run_id = self._client.create_run(self._experiment, tags={SEARCH_TAG: name}, run_name=name).info.run_id

    def try_to_write(self, trials: Sequence[Trial]) -> str:
        """Write the trials that have ended since. Return why that was impossible, "" if it was not: what is missing
        comes with the next ones, and a search is not ended by its tracking."""
        return self._attempt(lambda: self._write(trials))

    def try_to_finish(self, trials: Sequence[Trial], before_usd: float) -> str:
        """Write what is left, and end the parent run with the best trial and all dollars. Return as `try_to_write`."""
        return self._attempt(lambda: self._finish(trials, before_usd))

    def _attempt(self, action: Callable[[], None]) -> str:
        from mlflow.exceptions import MlflowException

        try:
            action()
        except (MlflowException, OSError) as error:
            return f"the search cannot be written to MLflow now: {error}"
        return ""

    def _write(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            if trial.state.is_final and trial.number not in self._done:
                self._write_trial(trial)
                self._done.add(trial.number)

    def _finish(self, trials: Sequence[Trial], before_usd: float) -> None:
        self._write(trials)
        best = best_trial(trials, self._sign)
        self._client.log_metric(self.run_id, "usd", before_usd + sum(trial.usd for trial in trials))
        if best is not None:
            score = best.best(self._sign)
            assert score is not None
            self._client.log_metric(self.run_id, f"best_{self._metric}", score)
            self._client.set_tag(self.run_id, "best_trial", str(best.number))
        self._client.set_terminated(self.run_id)

    def _write_trial(self, trial: Trial) -> None:
        from mlflow.entities import Metric, Param, RunTag

        run = self._begun.get(trial.number) or self._client.create_run(
            self._experiment,
            tags={SEARCH_TAG: self._name, TRIAL_TAG: str(trial.number), PARENT_TAG: self.run_id},
            run_name=f"{self._name}-{trial.number:04d}",
        )
        metrics = [
            Metric(self._metric, score, int(1000 * time), step)
            for score, time, step in zip(trial.scores, trial.times, trial.steps, strict=True)
            if math.isfinite(score)
        ]
        last = int(1000 * trial.times[-1]) if trial.times else 0
        best = trial.best(self._sign)
        figures: dict[str, Any] = {"usd": trial.usd, "node_seconds": trial.node_seconds, f"best_{self._metric}": best}
        metrics += [Metric(name, value, last, 0) for name, value in figures.items() if value is not None]
        known = run.data.params
        params = [Param(name, str(value)[:MOST_LENGTH]) for name, value in trial.values.items() if name not in known]
        tags = [RunTag("state", str(trial.state)), RunTag("reason", trial.reason)]
        self._client.log_batch(run.info.run_id, metrics=metrics, params=params, tags=tags)
        status = "FAILED" if trial.state is TrialState.FAILED else "FINISHED"
        self._client.set_terminated(run.info.run_id, status=status)
