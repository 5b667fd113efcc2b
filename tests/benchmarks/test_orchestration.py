"""What the benchmark says that Dagster costs: differences within pairs, not a line through two lengths."""

from __future__ import annotations

import math

import pytest

from benchmarks.orchestration import extra_seconds, paired_difference


def rows(*gaps: tuple[int, float, float]) -> list[dict[str, float]]:
    """Pairs of (steps, bare seconds, seconds more)."""
    return [
        {"steps": steps, "wall": bare + more, "bare_wall": bare, "cpu": bare + more, "bare_cpu": bare}
        for steps, bare, more in gaps
    ]


def test_runs_that_each_take_3_8_s_longer_cost_3_8_s() -> None:
    """A line through these points, which differ by noise only, had an intercept of 10 s and a slope below zero."""
    pairs = [(48, 15.0, 4.6), (48, 15.2, 3.8), (48, 15.1, 3.9), (480, 16.4, 3.5), (480, 16.2, 3.2), (480, 16.3, 3.8)]
    found = extra_seconds(rows(*pairs))
    for kind in ("cpu", "wall"):
        assert found[f"extra_{kind}_seconds"] == pytest.approx(3.8)
        assert found[f"extra_{kind}_low"] == pytest.approx(3.31, abs=0.02)
        assert found[f"extra_{kind}_high"] == pytest.approx(4.29, abs=0.02)
        assert found[f"extra_{kind}_by_steps"]["48"][0] == pytest.approx(4.1)
        assert found[f"extra_{kind}_by_steps"]["480"][0] == pytest.approx(3.5)


def test_one_pair_has_no_interval() -> None:
    assert paired_difference([2.0]) == (2.0, -math.inf, math.inf)
