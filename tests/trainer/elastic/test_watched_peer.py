"""Suspicion by past silences."""

from __future__ import annotations

import random

import pytest

from trainer.elastic.watched_peer import LEAST_GAPS, WINDOW, SignsOfLife, tail_of


def heard(gaps: list[float], expected: float = 0.5) -> SignsOfLife:
    signs, at = SignsOfLife(expected), 100.0
    signs.hear(at)
    for gap in gaps:
        at += gap
        signs.hear(at)
    return signs


def test_suspicion_grows_with_silence_and_ends_with_a_sign():
    signs = heard([0.5] * 20)
    seen = [signs.phi(110.0 + after) for after in (0.0, 0.5, 1.0, 2.0, 4.0)]
    assert seen == sorted(seen)
    assert seen[1] < 1 < 8 < seen[4]
    signs.hear(114.1)
    assert signs.phi(114.2) < 1


def test_a_peer_that_is_often_late_is_waited_for_longer():
    regular, late = heard([0.5] * 50), heard([0.5, 0.5, 0.5, 0.5, 2.5] * 10)
    at = 100.0 + 25.0
    assert regular.phi(at + 3.0) > 12
    assert late.phi(late.heard_at + 3.0) < 4  # type: ignore[operator]
    assert late.phi(late.heard_at + 12.0) > 12  # type: ignore[operator]


def test_an_unknown_past_is_judged_by_what_is_expected():
    assert SignsOfLife(0.5).phi(1e9) == 0.0, "nothing was heard yet"
    few = heard([0.001] * (LEAST_GAPS - 1))
    assert few.phi(few.heard_at + 1.0) < 2  # type: ignore[operator]
    hasty = heard([0.0001] * WINDOW)
    assert hasty.phi(hasty.heard_at + 1.0) < 2, "lines that come together make nobody certain"  # type: ignore[operator]


def test_who_did_not_listen_suspects_nobody():
    signs = heard([0.5] * 20)
    signs.forgive(200.0)
    assert signs.silence(200.5) == 0.5
    assert signs.phi(200.5) < 1
    signs.hear(200.6)
    assert signs.phi(201.0) < 1, "the gap of its own sleep is none of the peer's"


def test_old_gaps_are_forgotten():
    draw = random.Random(1)
    gaps = [draw.uniform(0.4, 0.6) for _ in range(WINDOW)]
    signs = heard([9.0] * 50 + gaps)
    alone = heard(gaps)
    after = signs.heard_at + 2.0  # type: ignore[operator]
    assert signs.phi(after) == pytest.approx(alone.phi(alone.heard_at + 2.0), rel=1e-6)  # type: ignore[operator]


def test_the_tail_is_that_of_the_normal_distribution():
    assert tail_of(0.0) == pytest.approx(0.30103, abs=1e-5)
    assert tail_of(3.0) == pytest.approx(2.8697, abs=1e-3)
    assert tail_of(29.999) == pytest.approx(tail_of(30.001), rel=1e-3)
