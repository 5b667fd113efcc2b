from __future__ import annotations

import copy
import hashlib
import json
import shutil
from pathlib import Path

import dagster as dg
import numpy as np
import pyarrow.parquet as pq
import pytest

from dtrain_dagster.assets.checks import check_leakage
from dtrain_dagster.data import leakage_check
from dtrain_dagster.data.leakage_check import (
    PENALTY,
    LeakageTrial,
    judge_leakage,
    main,
    plant_leak,
    read_windows,
    ridge,
    run_leakage_checks,
    shuffle_labels,
)
from dtrain_dagster.jobs.start import code_version
from tests.dtrain_dagster.data.price_files import Panel
from tests.trainer.market import Market

KNOWS = {"rank_ic": 0.9, "rank_ic_t": 30.0, "balanced_accuracy": 0.9, "balanced_accuracy_t": 30.0}
BLIND = {"rank_ic": 0.0, "rank_ic_t": 0.1, "balanced_accuracy": 0.5, "balanced_accuracy_t": 0.0}


def trial(nll: float, half: dict[str, float | None], gain_t: float | None = None) -> LeakageTrial:
    return LeakageTrial(nll=nll, gain_t=gain_t, halves=(half, half))


@pytest.mark.parametrize(
    ("shuffled", "planted", "control", "reason"),
    [
        (trial(-1.91, BLIND), trial(-4.0, KNOWS), trial(-2.0, BLIND), None),
        (trial(-1.99, BLIND), trial(-4.0, KNOWS), trial(-2.0, BLIND), "shuffled labels beats"),
        (trial(-1.99, BLIND, 2.1), trial(-4.0, KNOWS), trial(-2.0, BLIND), "shuffled labels beats"),
        (trial(-1.99, BLIND, 0.5), trial(-4.0, KNOWS), trial(-2.0, BLIND), None),  # of a few windows, by chance
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


def test_shuffling_moves_labels_only_and_planting_one_number_of_a_window(market: Market) -> None:
    given, features = read_windows(market, "valid"), len(market.spec.features)  # type: ignore[arg-type]
    before = given.features.copy()
    shuffled, planted = shuffle_labels(given, seed=0), plant_leak(given, features)
    assert np.array_equal(shuffled.features, before)
    assert (shuffled.labels != given.labels).mean() > 0.9
    assert np.array_equal(np.sort(shuffled.labels, axis=0), np.sort(given.labels, axis=0))
    changed = planted.features != before
    assert changed[:, -features].all()
    assert changed.sum() == len(before)
    assert np.corrcoef(planted.features[:, -features], planted.labels[:, 0])[0, 1] == pytest.approx(1.0)
    assert np.array_equal(given.features, before)


def test_leakage_checks_on_a_market_without_leaks(market: Market) -> None:
    result = run_leakage_checks(market)  # type: ignore[arg-type]
    assert result["checks"] == {"shuffled_labels_teach_nothing": [], "planted_leak_is_caught": []}
    trials = result["trials"]
    assert trials["control"]["gain_t"] > 2  # beyond chance
    assert trials["control"]["nll"] < result["constant_nll"]  # so that shuffled labels had something to miss
    json.dumps(result, allow_nan=False)


def test_long_windows_are_learned_from_as_short_ones_are() -> None:
    """There are fewer windows than numbers in one, and the smaller system is solved: of the same weights."""
    random = np.random.default_rng(0)
    features, labels = random.standard_normal((40, 60)).astype(np.float32), random.standard_normal((40, 2))
    penalty = 40 * PENALTY * np.eye(60)
    expected = np.linalg.solve(features.T @ features + penalty, features.T @ labels)
    solved = []
    solve = np.linalg.solve
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.linalg, "solve", lambda left, right: solved.append(len(left)) or solve(left, right))
        assert ridge(features, labels) == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert ridge(features[:, :30], labels).shape == (30, 2)
    assert solved == [40, 30]


@pytest.mark.slow
def test_a_dataset_without_volatility_is_refused_in_a_sentence(panel: Panel, tmp_path, capsys) -> None:
    folder = tmp_path / "dataset"
    shutil.copytree(panel.dataset.uri, folder)
    for file in sorted((folder / "data").glob("*.parquet")):
        table = pq.read_table(file).drop_columns(["target_log_rv"])
        pq.write_table(table, file)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["columns"] = [item for item in manifest["columns"] if item["name"] != "target_log_rv"]
    for shard in manifest["shards"]:
        content = (folder / shard["path"]).read_bytes()
        shard |= {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert main(["--dataset", str(folder)]) == 2
    assert "has no column target_log_rv" in capsys.readouterr().err


def test_without_a_dataset_it_says_so(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dataset", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_a_plant_that_goes_unnoticed_is_a_warning_and_a_leak_an_error(market: Market, tmp_path: Path) -> None:
    """Daily prices of a few months hardly tell a leak from chance: nobody is kept from training on them."""
    leaking = copy.deepcopy(market)
    leaking.features[:, 1] = np.nan_to_num(leaking.columns["target_return"])
    found = []
    for number, (shards, limit) in enumerate(((market, 1.0), (leaking, None))):
        with pytest.MonkeyPatch.context() as patch:
            if limit:
                patch.setattr(leakage_check, "suspect_leak", lambda halves: None)
            report = run_leakage_checks(shards)  # type: ignore[arg-type]
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / f"{code_version()}.json").write_text(json.dumps(report))
        reasons = report["checks"]["planted_leak_is_caught"]
        assert reasons[0].startswith(("a label planted", "on the unchanged data, rank_ic is ")[number])
        results = check_leakage(None, "", str(tmp_path / str(number)), dg.AssetKey("data"))  # type: ignore[arg-type]
        found.append({item.check_name: (item.passed, item.severity) for item in results}["planted_leak_is_caught"])
    assert found == [(False, dg.AssetCheckSeverity.WARN), (False, dg.AssetCheckSeverity.ERROR)]
