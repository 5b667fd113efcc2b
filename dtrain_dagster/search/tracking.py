"""A search in MLflow: a run for it, and one nested in it for each trial that has ended, with its values, its curve and
its dollars. Written by the orchestrator, so that nodes need no way to MLflow and load nothing for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from dtrain_dagster.registry.run_record import PARENT_TAG, RunGroup
from dtrain_dagster.search.trials import Trial, TrialState, best_trial
from trainer.observability.mlflow_sqlite import authorised

SEARCH_TAG, TRIAL_TAG = "dtrain.search", "dtrain.trial"
MOST_LENGTH = 500
"""Characters of a value that MLflow takes."""
PATIENCE_SECONDS = 60.0
"""Pause after a failure: whoever writes decides on trials, too, and must not wait for a dead server at each look."""


class SearchTracker:
    """Writes one search to MLflow."""

    def __init__(self, tracking_uri: str, experiment: str, name: str, metric: str, sign: float) -> None:
        """Find or begin its run. Raise as MLflow does where it cannot be reached."""
        self._group = RunGroup(authorised(tracking_uri), experiment, name, (SEARCH_TAG, name), TRIAL_TAG)
        self._name, self._metric, self._sign = name, metric, sign
        self._next_at = 0.0
        self.run_id = self._group.run_id
        self._done = {int(number) for number, run in self._group.nested.items() if run.info.status != "RUNNING"}

    def write(self, trials: Sequence[Trial], total_usd: float | None = None) -> str:
        """Write the trials that have ended since, and, given all dollars, the end of the search. Return why that was
        impossible, "" if it was not: what is missing is written a minute later, or in the end, and a search is not
        ended by its tracking."""
        from mlflow.exceptions import MlflowException

        if total_usd is None and time.monotonic() < self._next_at:
            return ""
        try:
            for trial in trials:
                if trial.state.is_final and trial.number not in self._done:
                    self._write_trial(trial)
                    self._done.add(trial.number)
            if total_usd is not None:
                best = best_trial(trials, self._sign)
                score = best.best(self._sign) if best else None
                metrics = {"usd": total_usd} | ({} if score is None else {f"best_{self._metric}": score})
                self._group.end("FINISHED", metrics, {"best_trial": str(best.number)} if best else {})
        except (MlflowException, OSError) as error:
            self._next_at = time.monotonic() + PATIENCE_SECONDS
            return f"the search cannot be written to MLflow now: {error}"
        return ""

    def _write_trial(self, trial: Trial) -> None:
        from mlflow.entities import Metric, Param

        client, number = self._group.client, str(trial.number)
        run = self._group.nested.get(number) or client.create_run(
            self._group.experiment_id,
            tags={TRIAL_TAG: number, PARENT_TAG: self.run_id},
            run_name=f"{self._name}-{trial.number:04d}",
        )
        run_id = run.info.run_id
        self._group.nest(
            run_id, {SEARCH_TAG: self._name, TRIAL_TAG: number, "state": str(trial.state), "reason": trial.reason}
        )
        metrics = [
            Metric(self._metric, score, int(1000 * at), step)
            for score, at, step in zip(trial.scores, trial.times, trial.steps, strict=True)
            if math.isfinite(score)
        ]
        last = int(1000 * trial.times[-1]) if trial.times else 0
        best = trial.best(self._sign)
        figures: dict[str, Any] = {"usd": trial.usd, "node_seconds": trial.node_seconds, f"best_{self._metric}": best}
        metrics += [Metric(name, value, last, 0) for name, value in figures.items() if value is not None]
        known = run.data.params
        params = [Param(name, str(value)[:MOST_LENGTH]) for name, value in trial.values.items() if name not in known]
        client.log_batch(run_id, metrics=metrics, params=params)
        client.set_terminated(run_id, status="FAILED" if trial.state is TrialState.FAILED else "FINISHED")
