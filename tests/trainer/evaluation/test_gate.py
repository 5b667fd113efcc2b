from __future__ import annotations

import copy
import subprocess
import sys

import pytest

from trainer.evaluation.gate import gate, suspect_leak

CALM = {"rank_ic": 0.01, "rank_ic_t": 0.5, "balanced_accuracy": 0.51, "balanced_accuracy_t": 1.0}
GOOD = {
    "model": {"nll": -2.0, "coverage_90": 0.9},
    "baselines": {"ewma": {"nll": -1.98}, "har_x": {"nll": -1.99}, "ridge": {"nll": -2.1}},
    "halves": [CALM, CALM],
}


def changed(path: str, value: object) -> dict:
    report = copy.deepcopy(GOOD)
    *keys, last = path.split(".")
    node: dict = report
    for key in keys:
        node = node[key]
    node[last] = value
    return report


def test_a_good_model_passes_whatever_the_ridge_does() -> None:
    assert gate(GOOD).passed
    assert gate(GOOD).reasons == ()


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("model.nll", -1.985, "not below har_x's -1.99"),
        ("model.nll", -1.99, "not below har_x's -1.99"),
        ("baselines.ewma", {"nll": -2.01}, "not below ewma's -2.01"),
        ("baselines.har_x", {}, "har_x could not be judged"),
        ("model.coverage_90", 0.86, "covers 0.860, outside [0.87, 0.93]"),
        ("model.coverage_90", 0.94, "covers 0.940"),
        ("halves", [{"rank_ic": 0.2, "rank_ic_t": 5.0}] * 2, "rank_ic is 0.200 and 0.200"),
    ],
)
def test_what_blocks_promotion(path: str, value: object, reason: str) -> None:
    decision = gate(changed(path, value))
    assert not decision.passed
    assert any(reason in said for said in decision.reasons)


def test_a_loss_without_a_distribution_cannot_be_promoted() -> None:
    decision = gate({"model": {"loss": 1.0}, "baselines": {}, "halves": []})
    assert not decision.passed
    assert "predicts no distribution" in decision.reasons[0]


@pytest.mark.parametrize(
    ("halves", "suspect"),
    [
        ([{**CALM, "rank_ic": 0.09, "rank_ic_t": 5.0}, {**CALM, "rank_ic": 0.12, "rank_ic_t": 6.0}], True),
        ([{**CALM, "rank_ic": 0.09, "rank_ic_t": 5.0}, CALM], False),  # not sustained
        ([{**CALM, "rank_ic": 0.2, "rank_ic_t": 9.0}, {**CALM, "rank_ic": 0.05, "rank_ic_t": 5.0}], False),
        ([{**CALM, "rank_ic": 0.2, "rank_ic_t": 3.0}] * 2, False),  # few days: could be chance
        ([{**CALM, "balanced_accuracy": 0.54, "balanced_accuracy_t": 5.0}] * 2, True),
        ([{**CALM, "balanced_accuracy": 0.525, "balanced_accuracy_t": 5.0}] * 2, False),
        ([{"rank_ic": None, "rank_ic_t": None, "balanced_accuracy": None, "balanced_accuracy_t": None}] * 2, False),
        ([], False),
    ],
)
def test_suspicion_of_a_leak(halves: list[dict[str, float | None]], suspect: bool) -> None:
    assert (suspect_leak(halves) is not None) == suspect


def test_the_gate_can_be_asked_without_torch() -> None:
    code = "import sys, trainer.evaluation.gate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
