"""Where a training was best, and whether it overfits: with evidence."""

from __future__ import annotations

import math

import pytest

from dtrain_dagster.dashboard.series import Evaluation, Learning, judge_learning


def verdict(*losses: float, training: tuple[float, ...] = ()) -> Learning:
    """Of evaluations after each epoch of ten steps; the training loss falls unless it is given."""
    means = training or tuple(1.0 - 0.1 * place for place in range(len(losses)))
    found = judge_learning(
        [
            Evaluation(step=10 * (place + 1), loss=loss, epoch=place + 1, training_loss=mean)
            for place, (loss, mean) in enumerate(zip(losses, means, strict=True))
        ]
    )
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((2.0,), "unknown"),
        ((2.0, 1.0), "improving"),
        ((2.0, 1.0, 1.5), "stalled"),  # one look is no evidence
        ((2.0, 1.0, 1.2, 1.3), "overfitting"),
        ((2.0, 1.0, 1.2, 1.3, 0.9), "improving"),
        ((2.0, 1.0, 1.2, 1.3, 1.07, 1.07), "stalled"),  # 7 % of the gain
        ((1.0, 2.0, 3.0), "overfitting"),  # it never became better than at the first look
        ((math.nan, 2.0, 1.0, math.inf), "improving"),
    ],
)
def test_a_rise_is_believed_from_two_looks_on(losses: tuple[float, ...], expected: str) -> None:
    assert verdict(*losses).state == expected


def test_where_the_training_loss_rises_as_well_it_is_no_overfitting() -> None:
    assert verdict(2.0, 1.0, 1.2, 1.3, training=(1.0, 0.5, 0.7, 0.9)).state == "worsening"


def test_the_words_name_the_best_epoch_and_what_it_costs_to_go_on() -> None:
    found = verdict(2.0, 1.0, 1.2, 1.3)
    assert (found.best.step, found.best.epoch) == (20, 2)
    assert found.words.startswith("Overfitting: the validation loss is lowest at step 20, epoch 2: 1.0000.")
    assert "risen by 0.3000" in found.words
    assert judge_learning([]) is None
