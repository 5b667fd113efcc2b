"""What the benchmark concludes from its intervals, and which settings it may give to whom."""

from __future__ import annotations

import math

import pytest

from benchmarks.frameworks.framework_process import Measurement
from benchmarks.frameworks.protocol import Case
from benchmarks.frameworks.rounds import Cell, overrides
from benchmarks.throughput import interval, loss_difference, summary


def cell(model: str = "tcn", **seconds: list[float]) -> Cell:
    case = Case(model=model, batch=64, ranks=2, dataset="", folder="", port=0)
    intervals = {name: [Measurement(10, 10 * value, 0.0, 0.0) for value in values] for name, values in seconds.items()}
    return Cell(case, 10, intervals)


def test_summary_takes_the_worst_rival_and_means_over_cells():
    cells = [
        cell(
            ours=[1.0] * 5,
            tuned=[0.5] * 5,
            bound=[0.96] * 5,
            bound_lockstep=[0.98] * 5,
            plain_ddp=[1.0] * 5,
            ray=[3.0] * 5,
        ),
        cell("lstm", ours=[1.0] * 5, tuned=[1.0] * 5, bound=[0.9] * 5, plain_ddp=[2.0] * 5, lightning=[0.8] * 5),
    ]
    cells[0].losses = {"ours": [-2.0], "tuned": [-1.98], "plain_ddp": [-1.98]}
    cells[1].losses = {"ours": [-2.0], "tuned": [-2.03], "plain_ddp": [-2.0]}
    cells.append(cell(plain_ddp_malloc=[0.1] * 5, plain_ddp_tuned=[0.4] * 5, ours=[1.0] * 5, tuned=[0.5] * 5))
    cells[2].losses = {"ours": [-2.0, -2.0], "tuned": [-2.02, -2.03]}
    found = summary(cells)
    assert found["min_vs_bound"] == 0.9
    assert found["min_vs_bound_lockstep"] == 0.98
    assert found["min_vs_any_peer"] == 0.8
    assert found["min_vs_any_peer_where"]["against"] == "lightning"
    assert found["geomean_vs_plain_ddp"] == 2.0
    assert found["geomean_vs_plain_ddp_equal"] == pytest.approx(math.sqrt(2), abs=1e-4)
    assert found["min_vs_plain_ddp_malloc"] == 0.1
    assert found["min_vs_any_peer"] == 0.8, "a rival at settings of its own is no rival at equal settings"
    assert found["geomean_tuned_vs_tuned"] == pytest.approx(0.8), "tuned is held against tuned"
    assert found["tuned_loss_difference_percent"] == {"tcn": pytest.approx(1.98), "lstm": pytest.approx(-3.045)}
    assert found["tuned_loss_difference_vs_plain_percent"] == {"tcn": 0.0, "lstm": pytest.approx(-3.045)}


def test_one_disturbed_round_moves_neither_the_ratio_nor_its_interval():
    middle, low, high = interval([[1.1] * 10 + [9.0]])
    assert (middle, low, high) == pytest.approx((1.1, 1.1, 1.1))


def test_a_lower_loss_is_a_negative_difference_wherever_zero_is():
    losses = {"tuned": [0.001, 2.0], "plain_ddp": [0.011, 2.0]}
    assert loss_difference(losses, "plain_ddp") == pytest.approx({"mean": -0.501, "low": -1.005, "high": 0.0})
    assert loss_difference({"ours": [1.0]}, "ours") is None


def test_what_cannot_be_chosen_is_not_tried():
    case = cell().case
    assert overrides("micro_batches", 3, case) is None
    assert overrides("precision", "fp32", case) is None
    assert overrides("no_such_setting", 1, case) is None
    assert overrides("micro_batches", 4, case) == {"batch_size_per_gpu": 16, "gradient_accumulation_steps": 4}
