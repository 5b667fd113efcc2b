"""Scores of rows against scikit-learn's, and the linear baseline against its own."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from thread_worlds import on_two_ranks

from tests.kinds import build_table
from trainer.data.row_data import RowData
from trainer.evaluation import row_comparison
from trainer.evaluation.evaluate import SharedWork
from trainer.evaluation.row_comparison import compare_rows, constant_forecast, fit_linear
from trainer.evaluation.row_scores import calibration_table, class_figures, class_sums, number_figures, number_sums
from trainer.model.rows import RowEncoder


def test_classes_are_scored_as_by_others_and_in_parts() -> None:
    from sklearn import metrics  # not above: every worker would load it

    random = np.random.default_rng(0)
    probabilities = random.dirichlet([0.5, 1, 2], 5000)
    target = np.array([random.choice(3, p=row) for row in probabilities])
    sums = class_sums(probabilities[:1234], target[:1234]) + class_sums(probabilities[1234:], target[1234:])
    found = class_figures(sums)
    assert found["log_loss"] == pytest.approx(metrics.log_loss(target, probabilities))
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(target, probabilities.argmax(1)))
    assert found["brier"] == pytest.approx(((probabilities - np.eye(3)[target]) ** 2).sum(1).mean())
    assert found["ece"] < 0.03, "they are drawn from these very probabilities"
    sharper = probabilities**3 / (probabilities**3).sum(1, keepdims=True)
    assert class_figures(class_sums(sharper, target))["ece"] > 0.1, "too sure of itself"
    timid = np.array([[0.6, 0.4]] * 100 + [[0.9, 0.1]] * 100)  # right 10 in 10, and 6 in 10
    mixed = class_figures(class_sums(timid, np.array([0] * 100 + [0] * 60 + [1] * 40)))
    assert mixed["ece"] == pytest.approx(0.5 * 0.4 + 0.5 * 0.3), "too sure in one bin does not make up for another"
    rows = calibration_table(sums)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert all(abs(row["confidence"] - row["accuracy"]) < 0.15 for row in rows if row["share"] > 0.02)


def test_a_certain_mistake_has_a_finite_loss() -> None:
    assert class_figures(class_sums(np.array([[1.0, 0.0]]), np.array([1])))["log_loss"] == pytest.approx(34.5, abs=0.1)


def test_numbers_are_scored_as_by_others() -> None:
    from sklearn import metrics

    random = np.random.default_rng(0)
    target = 1e6 + random.standard_normal(3000)
    forecast = target + 0.3 * random.standard_normal(3000)
    found = number_figures(number_sums(forecast[:99], target[:99], 1e6) + number_sums(forecast[99:], target[99:], 1e6))
    assert found["rmse"] == pytest.approx(metrics.root_mean_squared_error(target, forecast))
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(target, forecast))
    assert found["r2"] == pytest.approx(metrics.r2_score(target, forecast), abs=1e-6)


@pytest.mark.parametrize("target", ["value", "bought", "level"])
def test_the_linear_baseline_is_that_of_others(tmp_path: Path, target: str) -> None:
    from sklearn.linear_model import LogisticRegression, Ridge

    data = RowData(build_table(tmp_path, target).uri, tmp_path / "cache")
    model = fit_linear(data, SharedWork(), lambda: None)
    (x, y), (rows, truth) = (data.samples(split, np.arange(data.count(split))) for split in ("train", "test"))
    encoder = RowEncoder(data.spec)
    inputs, judged = encoder(x).numpy(), encoder(rows).numpy()
    found = model.forecast(rows)
    if target == "value":
        theirs = Ridge(alpha=1.0).fit(inputs, y.numpy()).predict(judged)
        assert found == pytest.approx(theirs, rel=1e-4)
        assert number_figures(number_sums(found, truth.numpy(), 100.0))["r2"] > 0.9
    else:
        # Two classes have two outputs here, and one there: half the penalty for the same difference.
        theirs = LogisticRegression(C=1.0 if target == "level" else 2.0, max_iter=1000).fit(inputs, y.numpy())
        assert found == pytest.approx(theirs.predict_proba(judged), abs=2e-3)


@pytest.mark.parametrize("target", ["value", "bought"])
def test_the_canary_is_silent_where_much_can_be_learned_and_not_where_targets_are_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Weights of shuffled targets point in the right direction half of the time."""
    x = np.random.default_rng(0).normal(size=3000)
    frame = pd.DataFrame({"x": x, "value": 10 * x, "bought": np.where(x > 0, "yes", "no")})
    data = RowData(build_table(tmp_path, target, frame).uri, tmp_path / "cache")
    scores, seeds = np.full(data.count("test"), np.nan), iter([*range(30), None])

    def fit(data: RowData, work: SharedWork, before_step: Any, shuffle_seed: int | None) -> Any:
        return fit_linear(data, work, before_step, None if shuffle_seed is None else next(seeds))

    monkeypatch.setattr(row_comparison, "fit_linear", fit)

    def is_silent() -> bool:
        _, canary = compare_rows(data, scores, SharedWork())
        return bool(canary["passed"])

    assert all(is_silent() for _ in range(30))
    assert not is_silent()


def test_ranks_share_the_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_comparison, "STEPS", 8)
    monkeypatch.setattr(row_comparison, "ALONE", 0)
    data = RowData(build_table(tmp_path).uri, tmp_path / "cache")
    alone = fit_linear(data, SharedWork(), lambda: None).weights.numpy()

    def fit(world: object) -> list[np.ndarray]:
        work = SharedWork(world)  # type: ignore[arg-type]
        return [fit_linear(data, work, lambda: None).weights.numpy(), constant_forecast(data, work)]

    for weights, constant in on_two_ranks(fit):
        assert weights == pytest.approx(alone, rel=1e-6, abs=1e-9)
        assert constant.tolist() == constant_forecast(data, SharedWork()).tolist()


def test_a_small_fit_is_done_by_each_rank_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = RowData(build_table(tmp_path).uri, tmp_path / "cache")
    monkeypatch.setattr(row_comparison, "ALONE", data.count("train") * (data.spec.inputs + 1) * 2)
    alone = fit_linear(data, SharedWork(), lambda: None).weights
    with ThreadPoolExecutor(1) as pool:  # of two ranks only one comes: a collective would wait for the other
        [one, _] = on_two_ranks(
            lambda world: (
                pool.submit(fit_linear, data, SharedWork(world), lambda: None).result(20).weights
                if world.rank == 0
                else alone
            )
        )
    assert one.equal(alone)


@pytest.mark.slow
def test_neither_the_fit_nor_the_usual_optimizer_loads_torchs_compiler(tmp_path: Path) -> None:
    uri = build_table(tmp_path).uri
    code = (
        "import sys\n"
        "import torch\n"
        "from trainer.config import DistributedTrainingConfig\n"
        "from trainer.data.row_data import RowData\n"
        "from trainer.evaluation.evaluate import SharedWork\n"
        "from trainer.evaluation.row_comparison import fit_linear\n"
        "from trainer.model.optimizers import USUAL, ScheduledOptimizer\n"
        f"fit_linear(RowData({uri!r}, {str(tmp_path / 'cache')!r}), SharedWork(), lambda: None)\n"
        "net = torch.nn.Linear(2, 1)\n"
        "made = ScheduledOptimizer(net, USUAL, DistributedTrainingConfig(), 10)\n"
        "net(torch.ones(3, 2)).sum().backward()\n"
        "made.optimizer.step()\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
