from __future__ import annotations

import pytest

from trainer.config import DistributedTrainingConfig
from trainer.engine.lr_schedule import learning_rate, peak_learning_rate


def config(**changes: object) -> DistributedTrainingConfig:
    return DistributedTrainingConfig(**{"learning_rate": 0.1, "warmup_steps": 10, **changes})  # type: ignore[arg-type]


def test_warm_up_rises_in_a_line_and_never_is_zero() -> None:
    rates = [learning_rate(config(), step, 110) for step in range(11)]
    assert rates[:10] == pytest.approx([0.01 * (step + 1) for step in range(10)])
    assert rates[9] == rates[10] == pytest.approx(0.1)


def test_the_cosine_falls_to_its_fraction() -> None:
    rates = [learning_rate(config(min_lr_fraction=0.2), step, 110) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[50], rates[-1]) == pytest.approx((0.1, 0.06, 0.02))
    assert learning_rate(config(min_lr_fraction=0.2), 500, 110) == pytest.approx(0.02), "it does not rise again"


def test_a_constant_rate_stays() -> None:
    assert {learning_rate(config(schedule="constant"), step, 50) for step in range(10, 60)} == {0.1}


def test_no_warm_up_and_one_that_is_too_long() -> None:
    assert learning_rate(config(warmup_steps=0), 0, 1) == pytest.approx(0.1)
    short = [learning_rate(config(warmup_steps=1000, schedule="constant"), step, 50) for step in range(6)]
    assert short == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1]), "a tenth of the training, not all of it"


def test_the_rate_scales_with_the_global_batch() -> None:
    plan = {"world_size": 2, "batch_size_per_gpu": 64, "gradient_accumulation_steps": 3, "lr_base_batch_size": 96}
    peaks = {rule: peak_learning_rate(config(lr_scaling=rule, **plan)) for rule in ("none", "linear", "sqrt")}
    assert peaks == pytest.approx({"none": 0.1, "linear": 0.4, "sqrt": 0.2})
