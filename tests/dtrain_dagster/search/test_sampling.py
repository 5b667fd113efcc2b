"""Values that are chosen by what trials so far have come to."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from played_search import OF, SPACE, play, score, source_of

from dtrain_dagster.search.source import draw_values, goals_of
from dtrain_dagster.search.space import count_trials, parse_space
from dtrain_dagster.search.trials import Pruner, Sampler, SearchSettings, Trial, TrialState


def trials_of(count: int, seed: int = 0) -> list[Trial]:
    """Trials with random values, whose score is best at a learning rate of 0.01 and no decay."""
    found = []
    for number in range(count):
        values = draw_values(SPACE, Sampler.random, seed, number, (), (), 1.0)
        assert values is not None
        scores = tuple(score(values, place) for place in range(1, OF + 1))
        found.append(Trial(number=number, values=values, of=OF, scores=scores, state=TrialState.COMPLETE))
    return found


@pytest.mark.slow
def test_chosen_values_are_better_than_random_ones_and_not_the_same_twice() -> None:
    random, chosen = (
        [
            play(source_of(SearchSettings(trials=14, parallel=2, sampler=sampler, pruner=Pruner.none, seed=seed)), [])
            for seed in range(2)
        ]
        for sampler in (Sampler.random, Sampler.gp)
    )
    late = [np.mean([trial.best(1.0) for trial in source.trials[8:]]) for source in (*random, *chosen)]
    assert np.mean(late[2:]) < 0.9 * np.mean(late[:2])
    assert all(len({str(trial.values) for trial in source.trials}) == 14 for source in chosen)


@pytest.mark.parametrize("sampler", [Sampler.gp, Sampler.random])
def test_of_a_space_of_few_trials_none_is_left_out_or_drawn_twice(sampler: Sampler) -> None:
    space = parse_space(
        {
            "model.args.channels": [[8, 16], [8, 32]],
            "model.args.layers": {"low": 1, "high": 9, "step": 4},
            "training.clip_norm": {"low": 0.1, "high": 0.2, "step": 0.1},
            "training.weight_decay": {"low": 0.5, "high": 0.5},
        }
    )
    assert count_trials(space) == 12
    known: list[Trial] = []
    while values := draw_values(space, sampler, 1, len(known), known, (), 1.0):
        known.append(Trial(number=len(known), values=values, of=1, scores=(1.0,), state=TrialState.COMPLETE))
    wanted = product([[8, 16], [8, 32]], (1, 5, 9), (0.1, 0.2), (0.5,))
    assert sorted(list(trial.values.values()) for trial in known) == sorted(map(list, wanted))


@pytest.mark.parametrize("missing", [0, 3, 1199])
def test_the_last_values_of_a_large_space_are_found(missing: int) -> None:
    space = parse_space({"training.seed": {"low": 1, "high": 400}, "model.factory": ["a", "b", "c"]})
    every = [{"training.seed": seed, "model.factory": name} for seed in range(1, 401) for name in "abc"]
    assert len({str(values) for values in every}) == count_trials(space) == 1200
    known = [
        Trial(number=number, values=values, of=1, scores=(1.0,), state=TrialState.COMPLETE)
        for number, values in enumerate(every)
        if number != missing
    ]
    assert draw_values(space, Sampler.random, 0, 1199, known, (), 1.0) == every[missing]
    known.append(replace(known[0], values=every[missing]))
    assert draw_values(space, Sampler.random, 0, 1200, known, (), 1.0) is None


def test_where_trials_fail_or_diverge_no_more_are_drawn() -> None:
    """A trial without a number says of its values that they are bad, not nothing."""
    known = [
        replace(trial, scores=(math.nan,), state=TrialState.PRUNED)
        if trial.values["training.learning_rate"] > 0.003
        else trial
        for trial in trials_of(24)
    ]
    drawn = [draw_values(SPACE, Sampler.gp, seed, 24, known, (), 1.0) for seed in range(4)]
    assert max(values["training.learning_rate"] for values in drawn if values is not None) < 0.01


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_trials_count_by_their_rank_and_one_without_a_number_as_the_worst(sign: float) -> None:
    def trial(*scores: float) -> Trial:
        return Trial(number=0, values={}, of=9, scores=tuple(sign * value for value in scores), state=TrialState.PRUNED)

    goals = goals_of([trial(3.0), trial(9.0, -1.0), trial(1e6), trial(3.0), trial(math.nan)], sign)
    assert goals == [math.log(2), 0.0, math.log(4), math.log(2), math.log(4)]
    assert goals_of([trial(), trial(math.nan)], sign) == [None, None]
