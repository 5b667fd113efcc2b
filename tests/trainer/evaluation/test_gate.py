from __future__ import annotations

import copy
from typing import Any

import pytest

from trainer.evaluation.gate import better_baselines, gate, gate_document, suspect_leak

CALM = {"rank_ic": 0.01, "rank_ic_t": 0.5, "balanced_accuracy": 0.51, "balanced_accuracy_t": 1.0}
RIDGE = {"nll": -2.001, "model_gain_nll": -0.001, "model_gain_t": -1.9}
GOOD = {
    "model": {"nll": -2.0, "coverage_90": 0.9},
    "baselines": {
        "ewma": {"nll": -1.98, "model_gain_nll": 0.02, "model_gain_t": 3.0},
        "har_x": {"nll": -1.99, "model_gain_nll": 0.01, "model_gain_t": 0.5},
        "ridge": RIDGE,
    },
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


def test_a_model_passes_that_no_baseline_is_better_than_beyond_chance() -> None:
    assert gate(GOOD).passed
    assert gate(GOOD).reasons == ()


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("baselines.har_x.model_gain_nll", -0.005, "NLL -2.0000 is not below har_x's -1.99"),
        ("baselines.har_x.model_gain_nll", 0.0, "not below har_x's -1.99"),
        ("baselines.har_x", {}, "har_x could not be judged"),
        ("baselines.ridge.model_gain_t", -2.1, "ridge's NLL -2.0010 is better than -2.0000 beyond chance (t 2.1)"),
        ("baselines.ridge.model_gain_t", None, "ridge's NLL -2.0010 is better than -2.0000 on too little to test"),
        ("baselines.constant", {"nll": -2.1, "model_gain_nll": -0.1, "model_gain_t": -9.0}, "constant's NLL -2.1000"),
        ("baselines.ewma", {"nll": -2.01, "model_gain_nll": -0.01, "model_gain_t": -9.0}, "not below ewma's -2.01"),
        ("model.coverage_90", 0.86, "covers 0.860, outside [0.87, 0.93]"),
        ("model.coverage_90", 0.94, "covers 0.940"),
        ("halves", [{"rank_ic": 0.2, "rank_ic_t": 5.0}] * 2, "rank_ic is 0.200 and 0.200"),
    ],
)
def test_what_blocks_promotion(path: str, value: object, reason: str) -> None:
    decision = gate(changed(path, value))
    assert not decision.passed
    assert len(decision.reasons) == 1, "each is told once"
    assert reason in decision.reasons[0]


@pytest.mark.parametrize(
    ("gain", "t", "is_better"),
    [(-0.1, -2.1, True), (-0.1, -2.0, False), (-0.1, None, True), (0.1, 2.1, False), (0.1, None, False)],
)
def test_a_baseline_that_is_better_beyond_chance(gain: float, t: float | None, is_better: bool) -> None:
    rows = {"ridge": {"model_gain_nll": gain, "model_gain_t": t}, "drift": {"mse_to_zero": 1.0}}
    assert better_baselines({"baselines": rows}) == ["ridge"] * is_better


@pytest.mark.parametrize(("ratio", "passed"), [(0.99, True), (1.0, False), (None, False)])
def test_a_point_forecast_must_beat_zero(ratio: float | None, passed: bool) -> None:
    model = {"loss": 1.0} if ratio is None else {"loss": 1.0, "mse_to_zero": ratio}
    verdict = gate({"model": model, "baselines": {}, "halves": []})
    assert (verdict.passed, bool(verdict.reasons)) == (passed, not passed)


@pytest.mark.parametrize("kind", ["windows", "rows", "tokens"])
def test_a_loss_that_gives_nothing_to_compare_cannot_be_promoted(kind: str) -> None:
    decision = gate({"kind": kind, "model": {"loss": 1.0}, "baselines": {}, "halves": []})
    assert not decision.passed
    assert "there is nothing to compare" in decision.reasons[0]


ROWS = {
    "kind": "rows", "task": "binary", "model": {"log_loss": 0.5}, "canaries": {"shuffled_targets": {"passed": True}},
    "baselines": {
        "constant": {"log_loss": 0.6, "model_gain": 0.1, "model_gain_t": 5.0},
        "linear": {"log_loss": 0.49, "model_gain": -0.01, "model_gain_t": -1.9},
    },
}  # fmt: skip


def test_the_rule_is_the_same_for_rows() -> None:
    report: Any = copy.deepcopy(ROWS)
    assert gate_document(report) == {"passed": True, "reasons": []}
    report["baselines"]["linear"]["model_gain_t"] = -2.1
    assert "linear's lo" in gate(report).reasons[0]
    assert gate(report).reasons[0].endswith("beyond chance (t 2.1)")
    report["baselines"]["linear"]["model_gain_t"] = None
    assert gate(report).reasons[0].endswith("on too little to test for chance")
    report = copy.deepcopy(ROWS)
    report["baselines"]["constant"]["model_gain"] = -0.001
    assert "is not below constant's" in " ".join(gate(report).reasons)
    report = copy.deepcopy(ROWS)
    report["canaries"]["shuffled_targets"]["passed"] = False
    assert gate(report).reasons == ("the canary shuffled_targets was not silent: see the notes",)


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
