"""Samples drawn by weights, and sorted by length: which they are, at any place of an epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import ConfigError
from trainer.data.coverage import DRAWS, SAMPLES, find_coverage_errors
from trainer.data.drawing import LengthDrawing, WeightedDrawing, choose_drawing
from trainer.data.sampler import Sampler


def drawn(drawing: Any, count: int, seed: int = 0, epoch: int = 0, batch: int = 8) -> np.ndarray[Any, Any]:
    return drawing.samples(np.arange(count), seed, epoch, batch)


def test_samples_come_as_often_as_their_weights_say() -> None:
    weights = np.array([0.0, 1.0, 0.0, 3.0, 6.0, 0.0] * 500)
    counts = np.zeros(6)
    for epoch in range(20):
        found = drawn(WeightedDrawing(weights, 3000), 3000, epoch=epoch)
        counts += np.bincount(found % 6, minlength=6)
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    expected = 60_000 * np.array([0.1, 0.3, 0.6])
    assert np.abs(counts[[1, 3, 4]] - expected).max() < 5 * np.sqrt(60_000 * 0.24)
    first = drawn(WeightedDrawing(weights, 3000), 3000)
    assert len(set(first.tolist())) < 1400, "some twice and some not"
    places = np.array([2, 7, 2])
    assert WeightedDrawing(7e300 * weights, 3000).samples(places, 0, 0, 1).tolist() == first[places].tolist()
    for other in ({"seed": 1}, {"epoch": 1}):
        assert drawn(WeightedDrawing(weights, 3000), 3000, **other).tolist() != first.tolist()


def test_a_weight_of_nearly_nothing_draws_nothing_behind_the_last() -> None:
    found = drawn(WeightedDrawing([1.0, 1e-300, 0.0], 3), 10_000)
    assert set(found.tolist()) == {0}


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=400), batch=st.integers(1, 40), epoch=st.integers(0, 3)
)
def test_each_sample_once_whatever_their_lengths(lengths: list[int], batch: int, epoch: int) -> None:
    found = drawn(LengthDrawing(lengths, len(lengths)), len(lengths), epoch=epoch, batch=batch)
    assert sorted(found.tolist()) == list(range(len(lengths)))


def test_samples_of_like_length_share_a_batch_and_batches_come_mixed() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 3200)
    drawing = LengthDrawing(lengths, 3200)
    sorted_by = lengths[drawn(drawing, 3200, batch=32)].reshape(-1, 32)
    padded = (sorted_by.max(1) * 32).sum() / lengths.sum()
    mixed = lengths.reshape(-1, 32)
    assert padded < 1.05 < (mixed.max(1) * 32).sum() / lengths.sum()
    means = sorted_by.mean(1)
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3, "no long run of long ones"
    other = drawn(drawing, 3200, epoch=1, batch=32)
    assert other.tolist() != drawn(drawing, 3200, epoch=0, batch=32).tolist()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("by", ["weights", "lengths"])
def test_any_number_of_ranks_has_the_same_micro_batches(by: str, world: int) -> None:
    values = [1.0 + number % 5 for number in range(50)]
    drawing = WeightedDrawing(values, 50) if by == "weights" else LengthDrawing(values, 50)
    ranks = [
        Sampler(
            samples=50, global_batch_size=12, micro_batches=3, seed=1, rank=rank, world_size=world, drawing=drawing
        )
        for rank in range(world)
    ]  # fmt: skip
    assert ranks[0].kind == (DRAWS if by == "weights" else SAMPLES)
    found = {
        (number, part.number): part.positions.tolist()
        for rank in ranks for number in range(ranks[0].steps_per_epoch) for part in rank.step(2, 12 * number)[1]
    }  # fmt: skip
    whole = [sample for key in sorted(found) for sample in found[key]]
    assert whole == drawing.samples(np.arange(50), 1, 2, 12).tolist()


BAD = {
    r"sample_weights\[1\] = -1 is negative": [1, -1, 1],
    r"sample_weights\[2\] is nan: give a finite number": [1, 1, float("nan")],
    r"sample_weights\[0\] is inf": [float("inf"), 1, 1],
    "sample_weights have 2, and there are 3 training samples": [1, 1],
    r"sample_weights have the shape \(1, 3\)": [[1, 1, 1]],
    "sample_weights are all 0, so no sample can be drawn": [0, 0, 0],
    "sample_weights are no numbers": ["a", 1, 1],
}


@pytest.mark.parametrize("said", BAD)
def test_weights_that_cannot_be_used_are_refused_by_name(said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_drawing(3, BAD[said], None)


def test_lengths_that_cannot_be_used_are_refused_by_name() -> None:
    for lengths, said in [([1, 2], "lengths have 2"), ([1, 2, float("nan")], r"lengths\[2\] is nan")]:
        with pytest.raises(ConfigError, match=said):
            choose_drawing(3, None, lengths)
    with pytest.raises(ConfigError, match="either sample_weights or lengths"):
        choose_drawing(3, [1, 1, 1], [1, 1, 1])
    with pytest.raises(ConfigError, match=r"training.shuffle_block reads samples block by block"):
        Sampler(
            samples=3, global_batch_size=2, micro_batches=1, seed=0, rank=0, world_size=1, shuffle_block=2,
            drawing=choose_drawing(3, [1, 1, 1], None),
        )  # fmt: skip
    assert choose_drawing(3, None, None) is None


def test_what_names_an_order() -> None:
    names = {WeightedDrawing(each, 2).name for each in ([1, 2], [1, 3], [2, 1])}
    assert len(names) == 3
    assert {name.partition("-")[0] for name in names} == {"weights"}
    assert WeightedDrawing([1, 2], 2).name == WeightedDrawing(np.array([1.0, 2.0]), 2).name


def test_records_of_draws_say_draws() -> None:
    [said] = find_coverage_errors([{"epoch": 0, "samples": 9, "digest": 1, "kind": DRAWS}], 9, 1)
    assert said == "epoch 1: 9 draws were used, but not each exactly once"
