from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch

from dtrain_dagster.data.leakage_check import (
    LeakageTrial,
    judge_leakage,
    main,
    plant_leak,
    run_leakage_checks,
    shuffle_labels,
)
from tests.trainer.market import Market

KNOWS = {"rank_ic": 0.9, "rank_ic_t": 30.0, "balanced_accuracy": 0.9, "balanced_accuracy_t": 30.0}
BLIND = {"rank_ic": 0.0, "rank_ic_t": 0.1, "balanced_accuracy": 0.5, "balanced_accuracy_t": 0.0}


def trial(nll: float, half: dict[str, float | None]) -> LeakageTrial:
    return LeakageTrial(nll=nll, halves=(half, half))


@pytest.mark.parametrize(
    ("shuffled", "planted", "control", "reason"),
    [
        (trial(-1.91, BLIND), trial(-4.0, KNOWS), trial(-2.0, BLIND), None),
        (trial(-1.99, BLIND), trial(-4.0, KNOWS), trial(-2.0, BLIND), "shuffled labels beats"),
        (trial(-1.90, BLIND), trial(-4.0, BLIND), trial(-2.0, BLIND), "went unnoticed"),
        (trial(-1.90, BLIND), trial(-4.0, KNOWS), trial(-4.0, KNOWS), "on the unchanged data, rank_ic"),
    ],
)
def test_verdict(shuffled: LeakageTrial, planted: LeakageTrial, control: LeakageTrial, reason: str | None) -> None:
    decision = judge_leakage(-1.9, shuffled, planted, control)
    reasons = [why for found in decision.values() for why in found]
    assert len(reasons) == (reason is not None)
    assert reason is None or reason in reasons[0]


@pytest.fixture(scope="module")
def market() -> Market:
    return Market()


def test_shuffling_moves_training_labels_only(market: Market) -> None:
    shuffle = shuffle_labels(market, seed=0)  # type: ignore[arg-type]

    def shuffled(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return shuffle(rows, *market.gather(rows))

    train, valid = (market.end_rows(split, np.arange(market.count(split))) for split in ("train", "valid"))
    windows, labels = shuffled(train)
    true_windows, true_labels = market.gather(train)
    torch.testing.assert_close(windows, true_windows)
    assert (labels != true_labels).float().mean() > 0.9
    torch.testing.assert_close(labels.sort().values, true_labels.sort().values)
    torch.testing.assert_close(shuffled(train[:5])[1], labels[:5])
    torch.testing.assert_close(shuffled(valid)[1], market.gather(valid)[1])


def test_planting_changes_one_number_and_not_the_data_beneath(market: Market) -> None:
    rows = market.end_rows("valid", np.arange(50))
    before = market.gather(rows)[0].clone()
    windows, labels = plant_leak(market)(rows, *market.gather(rows))  # type: ignore[arg-type]
    changed = windows != before
    assert changed[:, -1, 0].all()
    assert changed.sum() == 50
    assert np.corrcoef(windows[:, -1, 0], labels)[0, 1] == pytest.approx(1.0)
    torch.testing.assert_close(market.gather(rows)[0], before)


@pytest.mark.slow
def test_leakage_checks_on_a_market_without_leaks(market: Market) -> None:
    result = run_leakage_checks(copy.copy(market), steps=30)  # which gets a second target
    assert result["checks"] == {"shuffled_labels_teach_nothing": [], "planted_leak_is_caught": []}
    trials = result["trials"]
    assert trials["control"]["nll"] < result["constant_nll"]  # so that shuffled labels had something to miss
    json.dumps(result, allow_nan=False)


def test_without_a_dataset_it_says_so(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dataset", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
