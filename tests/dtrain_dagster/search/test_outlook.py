"""What trials say of those to come: by their values, by their curves, and by both."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from played_search import OF, SPACE, play, score, source_of

from dtrain_dagster.search.curves import Curve, floor_of, prior_of
from dtrain_dagster.search.outlook import LEAST_TRIALS, choose_values, outlook_of
from dtrain_dagster.search.pruning import Pruner
from dtrain_dagster.search.sampling import Sampler, draw_values
from dtrain_dagster.search.settings import SearchSettings
from dtrain_dagster.search.space import parse_space
from dtrain_dagster.search.surface import place_of, surface_of
from dtrain_dagster.search.trials import Trial, TrialState
from dtrain_dagster.search.worth import courses_of

RANDOM = np.random.default_rng


def trials_of(count: int, seed: int = 0, evaluations: int = OF) -> list[Trial]:
    """Trials with random values, whose score is best at a learning rate of 0.01 and no decay."""
    state = TrialState.COMPLETE if evaluations == OF else TrialState.PRUNED
    found = []
    for number in range(count):
        values = draw_values(SPACE, Sampler.RANDOM, seed, number, (), (), 1.0)
        assert values is not None
        scores = tuple(score(values, place) for place in range(1, evaluations + 1))
        found.append(Trial(number=number, values=values, of=OF, scores=scores, state=state))
    return found


def test_a_point_is_a_share_of_each_range_on_its_own_scale() -> None:
    space = parse_space(
        {
            "training.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
            "training.batch_size_per_gpu": [128, 32, 64],
            "model.factory": ["tcn", "lstm"],
            "model.args.channels": {"low": 16, "high": 32, "when": {"model.factory": "tcn"}},
        }
    )
    first = {"training.learning_rate": 1e-3, "training.batch_size_per_gpu": 128, "model.factory": "tcn"}
    assert place_of(space, {**first, "model.args.channels": 20}) == pytest.approx([0.5, 1.0, 1.0, 0.0, 0.25])
    assert place_of(space, {**first, "model.factory": "lstm"}) == pytest.approx([0.5, 1.0, 0.0, 1.0, 0.5])


def test_a_surface_foretells_scores_within_its_uncertainty_and_knows_what_matters() -> None:
    random = RANDOM(0)
    points = random.random((40, 4))  # only the first coordinate matters
    scores = np.sin(5 * points[:, 0]) + 0.05 * random.standard_normal(40)
    surface = surface_of(points[:30], scores[:30], np.zeros(30))
    mean, variance = surface.at(points[30:])
    assert np.abs(mean - scores[30:]).mean() < 0.4 * np.abs(scores[30:] - scores[:30].mean()).mean()
    assert (np.abs(mean - scores[30:]) < 3 * np.sqrt(variance)).all()
    assert (variance < surface.at(points[30:] + 5.0)[1]).all()  # far away, nothing is known


def test_what_is_unsure_counts_less() -> None:
    points, scores = np.array([[0.0], [0.45], [0.55], [1.0]]), np.array([0.0, 1.0, -1.0, 0.0])
    sure = surface_of(points, scores, np.array([0.0, 0.0, 9.0, 0.0])).at(np.array([[0.5]]))[0][0]
    other = surface_of(points, scores, np.array([0.0, 9.0, 0.0, 0.0])).at(np.array([[0.5]]))[0][0]
    assert sure > 0.2 > -0.2 > other


def test_an_end_that_is_expected_of_a_curve_is_the_one_that_was_told() -> None:
    """The mean and the variance become those that were asked for, about; a vague word changes nothing."""
    curves = [trial.curve(1.0) for trial in trials_of(12)]
    prior = prior_of(curves, floor_of(curves))
    assert prior is not None
    own_mean, own_variance = prior.end_moments()
    assert prior.expecting(own_mean - 1.0, 2 * own_variance) is prior
    mean, variance = prior.expecting(own_mean - 1.0, 0.01).end_moments()
    assert mean == pytest.approx(own_mean - 1.0, abs=0.1)
    assert variance == pytest.approx(0.01, rel=0.3)


def test_values_change_what_is_expected_of_a_curve() -> None:
    """Before its first evaluation, and less so after many."""
    known = trials_of(16)
    outlook = outlook_of(SPACE, known, (), 1.0)
    assert outlook is not None
    good = {"training.learning_rate": 0.01, "training.weight_decay": 0.1, "training.schedule": "cosine"}
    bad = {**good, "training.learning_rate": 1.0}

    def end(values: dict[str, object], done: int) -> float:
        curve = Curve(tuple(score(good, place) for place in range(1, done + 1)), OF)
        return float(np.median(courses_of(curve, outlook.prior_at(values), outlook.floor)[:, -1]))

    assert end(good, 0) < score(good, OF) + 0.1 < end(bad, 0)
    assert abs(end(bad, 7) - end(good, 7)) < 0.5 * abs(end(bad, 0) - end(good, 0))


def test_chosen_values_are_better_than_random_ones_and_not_the_same_twice() -> None:
    random, chosen = (
        [
            play(source_of(SearchSettings(trials=24, parallel=2, sampler=sampler, pruner=Pruner.NONE, seed=seed)), [])
            for seed in range(2)
        ]
        for sampler in (Sampler.RANDOM, Sampler.MODEL)
    )
    late = [np.mean([trial.best(1.0) for trial in source.trials[12:]]) for source in (*random, *chosen)]
    assert max(late[2:]) < min(late[:2])
    assert all(len({str(trial.values) for trial in source.trials}) == 24 for source in chosen)


def test_a_small_space_is_tried_out_before_anything_is_repeated() -> None:
    space = parse_space({"training.schedule": ["cosine", "constant"], "training.seed": [1, 2, 3, 4]})
    known: list[Trial] = []
    for number in range(14):
        values = draw_values(space, Sampler.MODEL, 0, number, known, (), 1.0)
        assert values is not None
        tried = {str(trial.values) for trial in known}
        assert number < LEAST_TRIALS or len(tried) == 8 or str(values) not in tried
        loss = values["training.seed"] / 10
        known.append(Trial(number=number, values=values, of=1, scores=(loss,), times=(1.0,), state=TrialState.COMPLETE))
    assert len({str(trial.values) for trial in known}) == 8  # and then some of them again


def test_the_next_one_is_drawn_elsewhere_than_those_that_run() -> None:
    known = trials_of(12)
    outlook = outlook_of(SPACE, known, (), 1.0)
    assert outlook is not None
    first = choose_values(outlook, known, 1.0, RANDOM(0))
    beside = Trial(number=12, values=first, of=OF)
    after = outlook_of(SPACE, known, [beside], 1.0)
    assert after is not None
    place = np.array([place_of(SPACE, first)])
    assert after.gains(place)[0] < 0.7 * outlook.gains(place)[0]
    assert choose_values(after, [*known, beside], 1.0, RANDOM(0)) != first


def test_where_trials_fail_or_diverge_no_more_are_drawn() -> None:
    """A trial without a number says of its values that they are bad, not nothing."""
    known = [
        replace(trial, scores=(math.nan,), state=TrialState.PRUNED)
        if trial.values["training.learning_rate"] > 0.003
        else trial
        for trial in trials_of(24)
    ]
    outlook = outlook_of(SPACE, known, (), 1.0)
    assert outlook is not None
    drawn = [choose_values(outlook, known, 1.0, RANDOM(seed))["training.learning_rate"] for seed in range(8)]
    assert max(drawn) < 0.004  # without them the best would be expected beyond


def test_a_trial_that_was_ended_early_counts_by_what_it_was_expected_to_end_with() -> None:
    """Where only such trials were, more is known than without them, and that it is worse there."""
    whole = [trial for trial in trials_of(24) if trial.values["training.learning_rate"] < 0.01]
    begun = [trial for trial in trials_of(24, evaluations=3) if trial.values["training.learning_rate"] > 0.2]
    assert len(begun) >= 2
    less, more = outlook_of(SPACE, whole, (), 1.0), outlook_of(SPACE, [*whole, *begun], (), 1.0)
    assert less is not None
    assert more is not None
    place = place_of(SPACE, {**begun[0].values, "training.weight_decay": 0.5})[None]
    (before, unsure_before), (after, unsure_after) = (each.surface.at(place) for each in (less, more))  # type: ignore[union-attr]
    assert unsure_after[0] < 0.7 * unsure_before[0]
    assert more.floor + np.exp(after[0]) > less.floor + np.exp(before[0])
