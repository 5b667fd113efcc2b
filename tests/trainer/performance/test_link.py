"""What a link takes, from sums that were measured over it, and for a ring of ranks."""

from __future__ import annotations

import math
import random

import pytest

from trainer.performance.link import (
    SIZES_APART,
    Link,
    bytes_carried,
    fit_collective,
    fit_link,
    ring_messages,
)

MESSAGE = Link(latency_seconds=50e-6, seconds_per_byte=1 / 3e9)


@pytest.mark.parametrize("ranks", [2, 3, 8, 256])
def test_a_ring_is_its_messages_and_a_message_its_ring(ranks: int) -> None:
    """The steps of a ring, added up: each rank passes a W-th of the bytes on, W - 1 times to sum and again to share."""
    ring, size = MESSAGE.over_ring(ranks), 12_345_678
    steps = sum(MESSAGE.seconds(size / ranks) for _ in range(2 * (ranks - 1)))
    assert ring.seconds(size) == pytest.approx(steps)
    again = ring.message_of_ring(ranks)
    assert (again.latency_seconds, again.seconds_per_byte) == pytest.approx(
        (MESSAGE.latency_seconds, MESSAGE.seconds_per_byte)
    )


def test_a_single_rank_sends_nothing_and_says_nothing_of_a_message() -> None:
    alone = MESSAGE.over_ring(1)
    assert alone == Link(latency_seconds=0.0, seconds_per_byte=0.0)
    assert alone.bytes_per_second == math.inf
    with pytest.raises(ValueError, match="two ranks"):
        MESSAGE.message_of_ring(1)


def test_the_collectives_of_one_world_and_the_messages_of_several_are_one_link() -> None:
    """A fit of what one world's collectives take, and a fit of messages over worlds, differ by the conversion only."""
    sizes, ranks = (176, 400_000, 5_000_000), 6
    times = [(size, MESSAGE.over_ring(ranks).seconds(size) * (1 + 0.1 * (-1) ** size)) for size in sizes]
    collective = fit_collective(times)
    message = fit_link((ring_messages(ranks), bytes_carried(ranks) * size, seconds) for size, seconds in times)
    assert collective is not None
    there = message.over_ring(ranks)
    assert (there.latency_seconds, there.seconds_per_byte) == pytest.approx(
        (collective.latency_seconds, collective.seconds_per_byte)
    )


def test_noise_of_large_sums_does_not_drown_what_small_ones_say_of_latency() -> None:
    chance = random.Random(3)
    sizes = [176, 1000, *(random.Random(4).randint(10**6, 10**8) for _ in range(20))]
    fit = fit_collective([(size, MESSAGE.seconds(size) * chance.uniform(0.9, 1.1)) for size in sizes])
    assert fit is not None
    assert fit.latency_seconds == pytest.approx(MESSAGE.latency_seconds, rel=0.12)
    assert fit.bytes_per_second == pytest.approx(MESSAGE.bytes_per_second, rel=0.05)


def test_no_part_is_negative_and_sizes_that_are_alike_tell_nothing() -> None:
    flat = fit_collective([(1000, 0.002), (100_000, 0.001)])
    assert flat is not None
    assert flat.seconds_per_byte == 0
    assert flat.latency_seconds > 0
    assert fit_collective([(1000, 0.001), (1000 * SIZES_APART - 1, 0.002)]) is None
    assert fit_collective([(0, 0.001), (1000, 0.0)]) is None
    with pytest.raises(ValueError, match="there are no measurements"):
        fit_link([(1.0, 1000.0, 0.0)])
