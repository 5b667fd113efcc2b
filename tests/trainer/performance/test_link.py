"""What a link takes, from sums that were measured over it."""

from __future__ import annotations

import pytest

from trainer.performance.link import link_of


def test_latency_and_bandwidth_are_told_apart() -> None:
    link = link_of([(56, 0.0003), (1_000_056, 0.1003), (56, 0.0003)])
    assert (link.latency_seconds, link.seconds_per_byte) == pytest.approx((0.0003, 1e-7))
    assert link_of([(56, 0.0003)]).seconds_per_byte == 0
