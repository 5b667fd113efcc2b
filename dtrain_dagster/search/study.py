"""What a search remembers, in Optuna's own storage: ``<home>/searches/<name>/study.db`` (SQLite), which Optuna's tools
read as well.

A trial is written with its values before its job is given, and a decision before it is told. So an orchestrator that
was killed finds each trial with the values that it had, each decision as it was made, and each end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dtrain_dagster.search.sampling import distribution_of, quiet, stored_value
from dtrain_dagster.search.space import Space
from dtrain_dagster.search.trials import Trial, TrialState

STUDY = "study.db"
BUSY_SECONDS = 60
"""Seconds to wait where another process, such as a page on the study, has the file."""


class StudyRecord:
    """Remembers the trials of a search in a study of Optuna."""

    def __init__(self, folder: Path | None, name: str, space: Space, sign: float) -> None:
        """Open the study in this folder, or begin it; None: in memory, for a search that is only played. ``sign``: 1
        where the metric is minimised, else -1."""
        import optuna

        quiet(optuna)
        self._space, self._sign = space, sign
        self._storage: optuna.storages.BaseStorage = optuna.storages.InMemoryStorage()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._storage = optuna.storages.RDBStorage(
                f"sqlite:///{folder / STUDY}", engine_kwargs={"connect_args": {"timeout": BUSY_SECONDS}}
            )
        self._study = optuna.create_study(
            study_name=name, storage=self._storage, direction="minimize" if sign > 0 else "maximize",
            load_if_exists=True,
        )  # fmt: skip

    def begun(self, number: int) -> Trial | None:
        """Return a trial as it is remembered: with its values, with the decision on it, if there was one, and with all
        of it, if it is over. None for one that was not begun."""
        trials = self._study.get_trials(deepcopy=False)
        if number >= len(trials):
            return None
        found, kept = trials[number], trials[number].user_attrs
        scores = tuple(value for _, value in sorted(found.intermediate_values.items()))
        trial = Trial(
            number=number,
            values=kept["values"],
            of=kept["of"],
            known=tuple(kept["known"]),
            scores=scores[: kept.get("ended_after", 0)],
            reason=kept.get("reason", ""),
        )
        if not found.state.is_finished():
            return trial
        times = tuple(kept["times"])
        return Trial(
            number=number, values=trial.values, of=trial.of, known=trial.known, reason=trial.reason,
            scores=scores[: len(times)], times=times, steps=tuple(kept["steps"]), state=TrialState(kept["state"]),
            usd=kept["usd"], node_seconds=kept["node_seconds"],
        )  # fmt: skip

    def begin(self, trial: Trial) -> None:
        """Remember a trial and its values."""
        import optuna

        there = [item for item in self._space.parameters if item.name in trial.values]
        self._study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.RUNNING,
                params={item.name: stored_value(item, trial.values[item.name]) for item in there},
                distributions={item.name: distribution_of(item) for item in there},
                user_attrs={"values": dict(trial.values), "known": list(trial.known), "of": trial.of},
            )
        )

    def decide(self, trial: Trial) -> None:
        """Remember that a trial ends after the evaluations that it has, and why."""
        self._write(trial, reason=trial.reason, ended_after=len(trial.scores))

    def end(self, trial: Trial) -> None:
        """Remember how a trial has ended. One whose end is known stays as it is."""
        import optuna

        if self._study.get_trials(deepcopy=False)[trial.number].state.is_finished():
            return
        self._write(
            trial, usd=trial.usd, node_seconds=trial.node_seconds, reason=trial.reason, times=list(trial.times),
            steps=list(trial.steps), state=str(trial.state),
        )  # fmt: skip
        best, states = trial.best(self._sign), optuna.trial.TrialState
        if trial.state is TrialState.COMPLETE and best is not None:
            self._study.tell(trial.number, best)
        else:
            self._study.tell(trial.number, state=states.FAIL if best is None else states.PRUNED)

    def _write(self, trial: Trial, **attributes: Any) -> None:
        """Write the evaluations of a trial that is not over, and these attributes."""
        study_id = self._storage.get_study_id_from_name(self._study.study_name)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
        known = self._storage.get_trial(trial_id).intermediate_values
        for place, score in enumerate(trial.scores, start=1):
            if place not in known:
                self._storage.set_trial_intermediate_value(trial_id, place, score)
        for name, value in attributes.items():
            self._storage.set_trial_user_attr(trial_id, name, value)
