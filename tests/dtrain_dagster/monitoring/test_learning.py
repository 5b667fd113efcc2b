"""Where a training was best, and whether it overfits: with evidence."""

from __future__ import annotations

import math

import pytest

from dtrain_dagster.monitoring.learning import Evaluation, LearningState, judge_learning


def curve(*losses: float, training: tuple[float, ...] = ()) -> list[Evaluation]:
    """Evaluations after each epoch of ten steps; the training loss falls unless it is given."""
    means = training or tuple(1.0 - 0.1 * place for place in range(len(losses)))
    return [
        Evaluation(step=10 * (place + 1), loss=loss, epoch=place + 1, training_loss=mean)
        for place, (loss, mean) in enumerate(zip(losses, means, strict=True))
    ]


def state(*losses: float, training: tuple[float, ...] = ()) -> LearningState:
    found = judge_learning(curve(*losses, training=training))
    assert found is not None
    return found.state


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((2.0,), LearningState.UNKNOWN),
        ((2.0, 1.0), LearningState.IMPROVING),
        ((2.0, 1.0, 1.5), LearningState.STALLED),  # one look is no evidence
        ((2.0, 1.0, 1.02, 1.03), LearningState.STALLED),  # 3 % of the gain
        ((2.0, 1.0, 1.2, 1.3), LearningState.OVERFITTING),
        ((2.0, 1.0, 1.2, 1.3, 0.9), LearningState.IMPROVING),
        ((2.0, 1.0, 1.2, 1.3, 1.07, 1.07), LearningState.STALLED),  # 7 %
        ((1.0, 2.0, 3.0), LearningState.OVERFITTING),  # it never became better than at the first look
    ],
)
def test_a_rise_is_believed_from_two_looks_on(losses: tuple[float, ...], expected: LearningState) -> None:
    assert state(*losses) == expected


def test_where_the_training_loss_rises_as_well_it_is_no_overfitting() -> None:
    assert state(2.0, 1.0, 1.2, 1.3, training=(1.0, 0.5, 0.7, 0.9)) == LearningState.WORSENING


def test_the_words_name_the_best_epoch_and_what_it_costs_to_go_on() -> None:
    found = judge_learning(curve(2.0, 1.0, 1.2, 1.3))
    assert found is not None
    assert (found.best.step, found.best.epoch, found.since) == (20, 2, 2)
    assert found.words.startswith("Overfitting: the validation loss is lowest at step 20, epoch 2: 1.0000.")
    assert "risen by 0.3000" in found.words


def test_losses_that_are_no_numbers_are_left_out() -> None:
    assert judge_learning([]) is None
    assert judge_learning(curve(math.nan)) is None
