"""The trials of a search as a fleet asks for them: the same seed gives the same trials, whatever the order of events,
and a search that was killed goes on where it was."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from played_search import OF, SPACE, Calls, make_job, play, resume, score, source_of, standing_of

from dtrain_dagster.fleet.jobs import FleetJob, FleetState
from dtrain_dagster.search.source import TrialSource
from dtrain_dagster.search.space import parse_space
from dtrain_dagster.search.trials import (
    DIVERGED,
    Pruner,
    Sampler,
    SearchSettings,
    Trial,
    TrialState,
    best_trial,
    why_ended,
)
from trainer.documents.events import EvaluationEvent


def fates(source: TrialSource) -> list[tuple[object, ...]]:
    """What the search did, without dollars."""
    return [(trial.values, trial.scores, trial.state, trial.reason) for trial in source.trials]


@pytest.mark.parametrize(
    ("sampler", "pruner"),
    [
        (Sampler.random, Pruner.asha),
        (Sampler.gp, Pruner.asha),
    ],
)
def test_the_same_seed_gives_the_same_trials_in_whatever_order_they_end(sampler: Sampler, pruner: Pruner) -> None:
    count = 12 if sampler is Sampler.gp else 16  # the later values of a Gaussian process take long
    settings = SearchSettings(trials=count, parallel=3, sampler=sampler, pruner=pruner, seed=5)
    random = np.random.default_rng(1)
    one = play(source_of(settings), [])
    other = play(source_of(settings), [], delay=lambda number, place: float(random.exponential(60.0)))
    assert fates(one) == fates(other)
    assert len({str(trial.values) for trial in one.trials}) == count
    another = play(source_of(SearchSettings(trials=1, sampler=sampler, pruner=pruner, seed=6)), [])
    assert another.trials[0].values != one.trials[0].values


def test_a_trial_waits_for_those_that_it_must_know() -> None:
    late = {1: 10_000.0}
    calls: Calls = []
    in_order = SearchSettings(trials=10, parallel=2, sampler=Sampler.random, pruner=Pruner.none)
    play(source_of(in_order), calls, delay=lambda number, place: late.get(number, 0.0))
    assert [job_id for job_id, outcome in calls if outcome is not None].index("trial-1") == 2


def test_a_killed_search_goes_on_with_the_same_trials() -> None:
    """The trials that ran begin again in the played fleet; what was drawn is what the fleet's record holds."""
    settings = SearchSettings(trials=9, parallel=2, seed=3)
    whole = play(source_of(settings), [])
    calls: Calls = []
    killed = play(source_of(settings), calls, stop_after=12)
    again = source_of(settings)
    resume(again, calls, killed)
    given = [job_id for job_id, outcome in calls if outcome is None]
    play(again, calls)
    assert fates(again) == fates(whole)
    jobs = [job_id for job_id, outcome in calls if outcome is None]
    assert jobs[: len(given)] == given
    assert len(jobs) == len(set(jobs)) == 9


def test_a_trial_that_the_one_before_has_ended_is_no_failure_of_its_own() -> None:
    settings = SearchSettings(trials=6, parallel=2, pruner=Pruner.asha)
    calls: Calls = []
    first = play(source_of(settings), calls)
    assert any(trial.state is TrialState.PRUNED for trial in first.trials)
    again = source_of(settings)
    told: Calls = [
        (job_id, end and (replace(end[0], reason=first.trials[int(job_id[6:])].reason), end[1]))
        for job_id, end in calls
    ]
    resume(again, told, first)
    assert fates(again) == fates(first)


@pytest.mark.parametrize("is_judged", [True, False])
def test_how_far_a_trial_comes_after_its_rung_and_whether_anyone_looks_in_time_decides_nothing(is_judged: bool) -> None:
    """Both are chance, where a seed has to give the same trials."""
    source = source_of(SearchSettings(trials=2, parallel=1, pruner=Pruner.asha, sampler=Sampler.random))
    for number, loss in enumerate((0.5, 0.9)):
        job = source.next_job()
        assert job is not None
        told = [EvaluationEvent(time=float(place), split="valid", step=place, loss=loss) for place in range(1, OF + 1)]
        verdict = source.judge(job.job_id, told[:1]) if is_judged else ""
        assert bool(verdict) is (is_judged and number == 1)
        source.on_end(standing_of(job.job_id, FleetState.ENDED if verdict else FleetState.SUCCEEDED), told)
    assert [(trial.state, len(trial.scores)) for trial in source.trials] == [
        (TrialState.COMPLETE, OF),
        (TrialState.PRUNED, 1),
    ]


def test_a_trial_whose_score_is_no_number_ends_at_once_and_is_never_best() -> None:
    settings = SearchSettings(trials=8, parallel=2, sampler=Sampler.random, pruner=Pruner.none)

    def diverging(values: object, place: int) -> float:
        loss = score(values, place)  # type: ignore[arg-type]
        return math.nan if loss > 1.3 and place == 2 else loss

    source = play(source_of(settings), [], curve=diverging)
    diverged = [trial for trial in source.trials if trial.reason == DIVERGED]
    assert diverged
    assert all(len(trial.scores) == 2 for trial in diverged)
    assert source.best is not None
    assert source.best.state is TrialState.COMPLETE
    play(source_of(SearchSettings(trials=8)), [], curve=diverging)  # infinity breaks nothing


def test_values_that_do_not_go_together_are_told_and_cost_nothing() -> None:
    def refusing(number: int, values: object) -> object:
        if number == 1:
            return FleetJob(job_id="trial-1", node_seconds=1.0, problem="no ranks for that batch"), 1
        return make_job(number, values)  # type: ignore[arg-type]

    settings = SearchSettings(trials=3, parallel=1, sampler=Sampler.random)
    source = TrialSource(SPACE, settings, refusing)  # type: ignore[arg-type]
    play(source, [])
    assert [trial.state for trial in source.trials][1] is TrialState.FAILED
    assert source.trials[1].reason == "no ranks for that batch"
    assert len(source.trials) == 3


def test_a_job_that_fails_by_itself_is_no_decision_of_the_search() -> None:
    source = source_of(SearchSettings(trials=2, parallel=1, sampler=Sampler.random))
    job = source.next_job()
    assert job is not None
    source.on_end(standing_of(job.job_id, FleetState.FAILED, "out of memory"), ())
    assert (source.trials[0].state, source.trials[0].reason) == (TrialState.FAILED, "out of memory")
    assert isinstance(source.next_job(), FleetJob)
    assert source.best is None


def test_more_of_a_metric_can_be_better() -> None:
    up, down = (
        play(source_of(SearchSettings(trials=12, maximise=maximise, sampler=Sampler.random, pruner=Pruner.asha)), [],
             curve=lambda values, place, sign=sign: sign * score(values, place))
        for maximise, sign in ((True, -1.0), (False, 1.0))
    )  # fmt: skip
    assert [trial.scores for trial in up.trials] == [tuple(-s for s in trial.scores) for trial in down.trials]
    assert up.best is not None
    assert best_trial(up.trials, -1.0) is up.best
    assert up.best.number == down.best.number  # type: ignore[union-attr]


def test_a_small_space_is_tried_out_and_nothing_is_bought_twice() -> None:
    space = parse_space({"training.learning_rate": [1e-3, 1e-2, 1e-1], "training.weight_decay": [0.0, 1.0]})
    settings = SearchSettings(trials=20, parallel=2)
    source = play(TrialSource(space, settings, make_job), [])
    assert len({str(trial.values) for trial in source.trials}) == len(source.trials) == 6
    assert source.best is not None
    assert source.best.values == {"training.learning_rate": 1e-2, "training.weight_decay": 0.0}


def test_of_three_trials_that_came_so_far_the_best_goes_on() -> None:
    def trial(number: int, *scores: float) -> Trial:
        return Trial(number=number, values={}, of=OF, scores=scores)

    others = [trial(0, 0.5, 0.4), trial(1, 0.6), trial(2, math.nan), trial(3, 0.9, 0.3, 0.2)]
    assert why_ended(Pruner.asha, trial(4, 0.5), others, 1.0) == ""
    assert why_ended(Pruner.asha, trial(4, 0.55), others, 1.0) == "not among the best at rung 1, after 1 evaluation(s)"
    assert why_ended(Pruner.asha, trial(4, 0.95), others, -1.0) == ""
    assert why_ended(Pruner.asha, trial(4, 0.55, 9.0), others, 1.0) == "", "there is no rung at two"
    assert why_ended(Pruner.asha, trial(4, 0.5, 0.5, 0.3), others, 1.0).startswith("not among the best at rung 2")
    assert why_ended(Pruner.none, trial(4, 0.95), others, 1.0) == ""
    assert why_ended(Pruner.none, trial(4, math.inf), (), 1.0) == DIVERGED
