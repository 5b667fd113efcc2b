"""What the benchmark concludes from its intervals."""

from __future__ import annotations

import math

import pytest

from benchmarks.frameworks.framework_process import Measurement
from benchmarks.frameworks.protocol import Case
from benchmarks.frameworks.rounds import Cell
from benchmarks.host import interval
from benchmarks.throughput import summary


def cell(model: str = "tcn", **seconds: list[float]) -> Cell:
    case = Case(model=model, batch=64, ranks=2, dataset="", folder="", port=0)
    intervals = {name: [Measurement(10, 10 * value, 0.0, 0.0) for value in values] for name, values in seconds.items()}
    return Cell(case, 10, intervals)


def test_summary_takes_the_worst_rival_and_means_over_cells():
    cells = [
        cell(ours=[1.0] * 5, bound=[0.96] * 5, bound_lockstep=[0.98] * 5, plain_ddp=[1.0] * 5, ray=[3.0] * 5),
        cell("lstm", ours=[1.0] * 5, bound=[0.9] * 5, plain_ddp=[2.0] * 5, lightning=[0.8] * 5),
        cell(plain_ddp_malloc=[0.1] * 5, ours=[1.0] * 5),
    ]
    found = summary(cells)
    assert found["min_vs_bound"] == 0.9
    assert found["min_vs_bound_lockstep"] == 0.98
    assert found["min_vs_any_peer"] == 0.8
    assert found["min_vs_any_peer_where"]["against"] == "lightning"
    assert found["geomean_vs_plain_ddp_equal"] == pytest.approx(math.sqrt(2), abs=1e-4)
    assert found["min_vs_plain_ddp_malloc"] == 0.1


def test_one_disturbed_round_moves_neither_the_ratio_nor_its_interval():
    middle, low, high = interval([[1.1] * 10 + [9.0]])
    assert (middle, low, high) == pytest.approx((1.1, 1.1, 1.1))
