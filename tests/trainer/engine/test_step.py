from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import steps
import torch
from thread_worlds import ALONE
from torch import nn

from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.data.batches import Batch, Samples
from trainer.engine.lr_schedule import learning_rate, peak_learning_rate
from trainer.engine.module_state import digest_state_dict
from trainer.engine.step import TrainingStep
from trainer.engine.steps import NonFiniteError, StepFlags
from trainer.runtime.fault_injection import InjectedError

NOTHING = StepFlags()


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(6, 1))


def batch(*sizes: int, samples: int | None = None) -> Batch:
    made = torch.Generator().manual_seed(1)
    parts = tuple(
        Samples(number, size, (torch.randn(size, 3, 2, generator=made), torch.randn(size, generator=made)))
        for number, size in enumerate(sizes)
    )
    return Batch(samples or sum(sizes), parts, digest=17)


def step_of(net: nn.Module, **settings: Any) -> TrainingStep:
    return steps.step_of(net, **{"clip_norm": None, "weight_decay": 0.0, **settings})


def test_the_learning_rate_is_the_one_given_and_gradients_do_not_pile_up() -> None:
    net = model()
    step = step_of(net)
    before = digest_state_dict(dict(net.named_parameters()))
    first = step(batch(4), 0, 0.0, NOTHING)
    assert digest_state_dict(dict(net.named_parameters())) == before, "a rate of zero changes nothing"
    assert step(batch(4), 0, 0.0, NOTHING).grad_norm == pytest.approx(first.grad_norm)
    step(batch(4), 0, 0.1, NOTHING)
    assert digest_state_dict(dict(net.named_parameters())) != before


def test_clipping_bounds_the_gradient_and_tells_its_norm_from_before() -> None:
    net = model()
    norm = step_of(net, clip_norm=0.01)(batch(8), 0, 0.0, NOTHING).grad_norm
    clipped = torch.cat([parameter.grad.flatten() for parameter in net.parameters() if parameter.grad is not None])
    assert norm > 0.1
    assert float(clipped.norm()) == pytest.approx(0.01, rel=1e-3)


def test_elements_are_clipped_by_their_value_after_the_sum() -> None:
    net = model()
    step_of(net, clip_value=0.05)(batch(8, 8), 0, 0.0, NOTHING)
    plain = model()
    step_of(plain)(batch(8, 8), 0, 0.0, NOTHING)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert float(theirs.grad.abs().max()) > 0.05
        torch.testing.assert_close(mine.grad, theirs.grad.clamp(-0.05, 0.05), rtol=0, atol=0)
    with pytest.raises(ConfigError, match=r"clips instead of clip_norm = 1\.0: set clip_norm to None"):
        DistributedTrainingConfig(clip_value=0.5)


def test_dropout_belongs_to_the_micro_batch_and_the_step() -> None:
    def loss(at: int) -> float:
        torch.manual_seed(torch.seed())  # whatever happened before must not matter
        return step_of(model(dropout=0.5))(batch(50, 50), at, 0.0, NOTHING).loss_sum

    assert loss(7) == loss(7)
    assert loss(7) != loss(8)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e38])
def test_a_loss_that_is_not_finite_ends_before_the_weights_are_touched(poison: float) -> None:
    net = model()
    step = step_of(net)
    before = digest_state_dict(dict(net.named_parameters()))
    bad = batch(4)
    bad.micro_batches[0].data[0][0, 0, 0] = poison
    said = "a sample of the training split has (nan|inf) in its inputs: fix.*where that is meant, lower"
    with pytest.raises(NonFiniteError, match=f"not finite at step 13 .*{said if poison != 1e38 else 'lower'}"):
        step(bad, 12, 0.1, NOTHING)
    assert digest_state_dict(dict(net.named_parameters())) == before


def test_fp16_on_a_processor_is_refused_and_bf16_is_close() -> None:
    with pytest.raises(ConfigError, match=r"'fp16' needs a GPU; use 'bf16'"):
        step_of(model(), precision="fp16")
    losses = [
        step_of(model(), precision=precision)(batch(64), 0, 0.1, NOTHING).loss_sum for precision in ("fp32", "bf16")
    ]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_saved_optimizer_goes_on_as_if_nothing_had_been() -> None:
    one = step_of(model())
    for number in range(3):
        one(batch(8), number, 0.05, NOTHING)
    other = step_of(model())
    other.module.load_state_dict(one.module.state_dict())
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for step in (one, other):
        step(batch(8), 3, 0.05, NOTHING)
    weights = [digest_state_dict(dict(step.module.named_parameters())) for step in (one, other)]
    assert weights[0] == weights[1]


def test_moments_that_a_file_has_row_by_row_belong_to_weights_that_lie_otherwise() -> None:
    def turned() -> nn.Module:
        net = model()
        net[2].weight = nn.Parameter(torch.arange(18.0).reshape(6, 3).t())
        return net

    net, other = turned(), turned()
    step = step_of(net)
    step(batch(4), 0, 0.1, NOTHING)
    saved = copy.deepcopy(step.state_dict())
    for moments in saved["optimizer"]["state"].values():
        moments.update({name: value.contiguous() for name, value in moments.items()})
    other.load_state_dict(net.state_dict())
    resumed = step_of(other)
    resumed.load_state_dict(saved)
    for one in (step, resumed):
        one(batch(4), 1, 0.1, NOTHING)
    torch.testing.assert_close(other.state_dict(), net.state_dict(), rtol=0, atol=0)


def test_a_step_tells_the_votes_and_which_samples_it_used() -> None:
    flags = StepFlags(leaving=1, regroup=1, cut_off=1)
    result = step_of(model())(batch(2), 0, 0.0, flags)
    assert (result.flags, result.digest) == (flags, 17)


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_a_step_that_failed_is_done_again_as_if_it_had_not_been_tried(at: str) -> None:
    """Weights, running statistics and random state are those of a step that went well at once."""

    def trained(faults: str) -> str:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))
        step = step_of(net, faults=faults)
        for number in range(4):
            try:
                step(batch(8, 8), number, 0.1, NOTHING)
            except InjectedError:
                before = digest_state_dict(net.state_dict())
                step.adopt(ALONE)
                assert digest_state_dict(net.state_dict()) == before
                step(batch(8, 8), number, 0.1, NOTHING)
        return digest_state_dict(net.state_dict())

    fault = f'[{{"kind": "raise", "at": "{at}", "step": 2, "node": 0}}]'
    assert trained(fault) == trained("[]")


def test_a_digest_sees_names_shapes_and_every_bit() -> None:
    one = torch.arange(4.0)
    other = one.clone()
    other[2] = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0))
    named = [[("a", one)], [("b", one)], [("a", one.view(2, 2))], [("a", other)], [("a", one.double())]]
    named += [[("a", one), ("b", torch.empty(0))], [("a", torch.tensor(1.0))]]
    digests = {digest_state_dict(dict(tensors)) for tensors in named}
    assert len(digests) == 7
    assert digest_state_dict({"a": one.clone()}) in digests


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
