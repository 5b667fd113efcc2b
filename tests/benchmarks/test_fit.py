"""What `benchmarks.fit` concludes from what it has measured."""

from __future__ import annotations

import pytest

from benchmarks.fit import BATCH, conclude, pace


def test_the_lowest_median_ratio_is_the_conclusion() -> None:
    found = conclude({
        "tensors, 1 ranks": {"fit": [300.0, 200.0, 400.0], "loop": [90.0, 80.0, 70.0], "plain": [100.0, 100.0, 100.0]},
        "python, 1 ranks": {"fit": [90.0, 110.0, 101.0], "plain": [100.0, 100.0, 100.0]},
    })  # fmt: skip
    assert (found["min_vs_plain"], found["min_loop_vs_plain"]) == (1.01, 0.8)
    cell = found["cells"]["python, 1 ranks"]["fit_vs_plain"]
    assert cell["low"] <= cell["ratio"] == 1.01 <= cell["high"]


def test_the_first_epoch_does_not_count() -> None:
    first = [0.0, 50.0, 90.0, 95.0]
    assert pace([*first, 100.0, 101.0, 102.0, 103.0], 4 * BATCH, 1) == pytest.approx(BATCH)
    assert pace([*first[:2], 100.0, 101.0], 4 * BATCH, 2) == pytest.approx(2 * BATCH)
