"""What a search remembers, in Optuna's own storage: ``<home>/searches/<name>/study.db`` (SQLite), which Optuna's tools
read as well.

A trial is written with its values before its job is given, and a decision before it is told. So an orchestrator that
was killed finds each trial with the values that it had, and each decision as it was made.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dtrain_dagster.search.sampling import distribution_of, quiet, stored_value
from dtrain_dagster.search.space import Space
from dtrain_dagster.search.trials import Trial, TrialState

if TYPE_CHECKING:
    import optuna

STUDY = "study.db"
VALUES, KNOWN, ENDED_AFTER, REASON, MARKS, USD, SECONDS, TIMES, STEPS = (
    "values", "known", "ended_after", "reason", "marks", "usd", "node_seconds", "times", "steps"
)  # fmt: skip


BUSY_SECONDS = 60
"""Seconds to wait where another process, such as a page on the study, has the file."""


class TrialRecord(Protocol):
    """Remembers trials and decisions on them."""

    def begun(self, number: int) -> Trial | None:
        """Return a trial as it was begun, with the decision on it; None for one that was not."""

    def begin(self, trial: Trial) -> None:
        """Remember a trial and its values."""

    def decide(self, trial: Trial) -> None:
        """Remember that a trial ends after the evaluations that it has, and why; or its marks."""

    def end(self, trial: Trial) -> None:
        """Remember how a trial has ended."""


class MemoryRecord:
    """Remembers trials for as long as this process lives: for searches that are only played."""

    def __init__(self) -> None:
        self._trials: dict[int, Trial] = {}

    def begun(self, number: int) -> Trial | None:
        """Return a trial as it was begun."""
        return self._trials.get(number)

    def begin(self, trial: Trial) -> None:
        """Remember a trial."""
        self._trials[trial.number] = trial

    decide = end = begin


class StudyRecord:
    """Remembers trials in a study of Optuna."""

    def __init__(self, folder: Path, name: str, space: Space, sign: float) -> None:
        """Open the study, or begin it. ``sign``: 1 where the metric is minimised, else -1."""
        import optuna

        quiet(optuna)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._space = space
        storage = optuna.storages.RDBStorage(
            f"sqlite:///{folder / STUDY}", engine_kwargs={"connect_args": {"timeout": BUSY_SECONDS}}
        )
        directions = optuna.study.StudyDirection
        direction = directions.MINIMIZE if sign > 0 else directions.MAXIMIZE
        self._study = optuna.create_study(study_name=name, storage=storage, direction=direction, load_if_exists=True)

    def begun(self, number: int) -> Trial | None:
        """Return a trial as it was begun, with the decision on it; None for one that was not."""
        found = self._found(number)
        if found is None:
            return None
        kept = found.user_attrs
        scores = tuple(value for _, value in sorted(found.intermediate_values.items()))
        ended_after = kept.get(ENDED_AFTER)
        return Trial(
            number=number,
            values=kept[VALUES],
            of=kept["of"],
            known=tuple(kept[KNOWN]),
            scores=scores[:ended_after] if ended_after else (),
            reason=kept.get(REASON, ""),
            marks=kept.get(MARKS, {}),
        )

    def begin(self, trial: Trial) -> None:
        """Remember a trial and its values."""
        import optuna

        parameters = {item.name: item for item in self._space.parameters}
        self._study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.RUNNING,
                params={name: stored_value(parameters[name], value) for name, value in trial.values.items()},
                distributions={name: distribution_of(parameters[name]) for name in trial.values},
                user_attrs={VALUES: dict(trial.values), KNOWN: list(trial.known), "of": trial.of},
            )
        )

    def decide(self, trial: Trial) -> None:
        """Remember its marks, and, where it has a reason, that it ends after the evaluations that it has."""
        handle = self._handle(trial)
        if handle is None:
            return
        if trial.marks:
            handle.set_user_attr(MARKS, dict(trial.marks))
        if trial.reason:
            handle.set_user_attr(REASON, trial.reason)
            handle.set_user_attr(ENDED_AFTER, len(trial.scores))

    def end(self, trial: Trial) -> None:
        """Remember how a trial has ended. A trial whose end is known stays as it is."""
        import optuna

        handle = self._handle(trial)
        if handle is None:
            return
        attributes: dict[str, Any] = {
            USD: trial.usd, SECONDS: trial.node_seconds, REASON: trial.reason, MARKS: dict(trial.marks),
            TIMES: list(trial.times), STEPS: list(trial.steps), "state": str(trial.state),
        }  # fmt: skip
        for name, value in attributes.items():
            handle.set_user_attr(name, value)
        direction = self._study.direction
        best = trial.best(1.0 if direction == optuna.study.StudyDirection.MINIMIZE else -1.0)
        states = optuna.trial.TrialState
        if trial.state is TrialState.COMPLETE and best is not None:
            self._study.tell(trial.number, best)
        else:
            self._study.tell(trial.number, state=states.FAIL if best is None else states.PRUNED)

    def _found(self, number: int) -> optuna.trial.FrozenTrial | None:
        trials = self._study.get_trials(deepcopy=False)
        return trials[number] if number < len(trials) else None

    def _handle(self, trial: Trial) -> optuna.Trial | None:
        """Return Optuna's hold on a trial that is not over, after its new evaluations were reported to it."""
        import optuna

        found = self._found(trial.number)
        if found is None or found.state.is_finished():
            return None
        handle = optuna.Trial(self._study, found._trial_id)
        for place, score in enumerate(trial.scores, start=1):
            if place not in found.intermediate_values:
                handle.report(score, place)
        return handle
