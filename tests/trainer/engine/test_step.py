from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainer.comm.launcher_env import RankFacts
from trainer.comm.world import World
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.data.batches import Batch, Samples
from trainer.data.coverage import digest_samples as digest_of
from trainer.data.loader import BatchLoader
from trainer.data.sampler import Sampler
from trainer.data.shards import DataShardManager
from trainer.engine.module_state import digest_state_dict
from trainer.engine.out_of_memory import MicroBatchLimit
from trainer.engine.step import NonFiniteError, StepFlags, TrainingStep
from trainer.model.task import SupervisedTask
from trainer.runtime.fault_injection import Faults, InjectedError
from trainer.runtime.step_timer import StepTimer

CPU = torch.device("cpu")
ALONE = World(RankFacts(), CPU, "gloo")
NOTHING = StepFlags()


class Squared(nn.Module):
    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs[:, 0] - target) ** 2


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


def step_of(net: nn.Module, settings: DistributedTrainingConfig | None = None, faults: str = "[]") -> TrainingStep:
    """A step in a world of one."""
    step = TrainingStep(net, SupervisedTask(Squared()), settings or config(), CPU, Faults({"DTRAIN_FAULTS": faults}, 0))
    step.adopt(ALONE)
    return step


def config(**changes: Any) -> DistributedTrainingConfig:
    return DistributedTrainingConfig(**{"clip_norm": None, "weight_decay": 0.0, **changes})


def test_the_gradient_is_that_of_the_mean_over_all_samples_however_unequal_the_parts() -> None:
    net = model()
    step = step_of(net)
    parts = batch(3, 1, 4)
    reference = model()
    windows, target = (torch.cat([part.data[place] for part in parts.micro_batches]) for place in (0, 1))
    mean = Squared()(reference(windows), target).mean()
    mean.backward()
    expected = torch.cat(
        [parameter.grad.flatten() for parameter in reference.parameters() if parameter.grad is not None]
    )
    result = step(parts, 0, 0.0, NOTHING)
    got = torch.cat([parameter.grad.flatten() for parameter in net.parameters() if parameter.grad is not None])
    assert torch.allclose(got, expected, atol=1e-6)
    assert result.loss_sum == pytest.approx(mean.item() * 8)
    assert result.grad_norm == pytest.approx(float(expected.norm()))


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
    norm = step_of(net, config(clip_norm=0.01))(batch(8), 0, 0.0, NOTHING).grad_norm
    clipped = torch.cat([parameter.grad.flatten() for parameter in net.parameters() if parameter.grad is not None])
    assert norm > 0.1
    assert float(clipped.norm()) == pytest.approx(0.01, rel=1e-3)


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
        step_of(model(), config(precision="fp16"))
    losses = [
        step_of(model(), config(precision=precision))(batch(64), 0, 0.1, NOTHING).loss_sum
        for precision in ("fp32", "bf16")
    ]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_saved_optimizer_goes_on_as_if_nothing_had_been() -> None:
    one = step_of(model())
    for number in range(3):
        one(batch(8), number, 0.05, NOTHING)
    other = step_of(model())
    other.model.load_state_dict(one.model.state_dict())
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for step in (one, other):
        step(batch(8), 3, 0.05, NOTHING)
    weights = [digest_state_dict(dict(step.model.named_parameters())) for step in (one, other)]
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


def test_parts_of_a_micro_batch_have_the_same_gradient_as_the_whole() -> None:
    """D4: less goes through the model at once."""
    whole, parts = model(), model()
    one, other = step_of(whole), step_of(parts)
    other.apply_limit(MicroBatchLimit(3, True))
    cut = batch(8, 4)
    places = [
        Samples(part.number, len(target), (windows, target), place)
        for part in cut.micro_batches
        for place, (windows, target) in enumerate(zip(*(tensor.split(3) for tensor in part.data), strict=True))
    ]
    assert len(places) == 5
    results = [one(batch(8, 4), 0, 0.1, NOTHING), other(replace(cut, micro_batches=tuple(places)), 0, 0.1, NOTHING)]
    assert results[0].loss_sum == pytest.approx(results[1].loss_sum, rel=1e-6)
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-6)


def test_the_loader_gives_what_the_sampler_deals_from_any_step_on(dataset: Path, cache: Path) -> None:
    shards = DataShardManager(str(dataset), cache)
    sampler = Sampler(
        samples=shards.count("train"), global_batch_size=240, micro_batches=6, seed=1, rank=1, world_size=2
    )
    loader = BatchLoader(shards.make_reader(CPU, None), sampler, CPU, Faults({}, 0), StepTimer(True, CPU))
    whole = list(loader.batches(2, 0, 0))
    assert len(whole) == sampler.steps_per_epoch
    for step, found in enumerate(whole):
        samples, dealt = sampler.step(2, 240 * step)
        assert found.digest == digest_of(np.concatenate([part.positions for part in dealt]))
        assert (found.samples, [part.number for part in found.micro_batches]) == (
            samples,
            [part.number for part in dealt],
        )
        for read, part in zip(found.micro_batches, dealt, strict=True):
            windows, target = read.data
            expected = shards.gather(shards.end_rows("train", part.positions))
            assert torch.equal(windows, expected[0])
            assert torch.equal(target, expected[1])
    later = list(loader.batches(2, 5 * 240, 5))
    assert all(
        torch.equal(a.micro_batches[0].data[1], b.micro_batches[0].data[1])
        for a, b in zip(whole[5:], later, strict=True)
    )
    loader.close()


def test_a_digest_sees_names_shapes_and_every_bit() -> None:
    one = torch.arange(4.0)
    other = one.clone()
    other[2] = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0))
    named = [[("a", one)], [("b", one)], [("a", one.view(2, 2))], [("a", other)], [("a", one.double())]]
    named += [[("a", one), ("b", torch.empty(0))], [("a", torch.tensor(1.0))]]
    digests = {digest_state_dict(dict(tensors)) for tensors in named}
    assert len(digests) == 7
    assert digest_state_dict({"a": one.clone()}) in digests
