"""The plan of a search, its results, and its file of settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from played_search import USUAL

from dtrain_dagster.planning.tuned_settings import read_tuned
from dtrain_dagster.search.results import improvements, settings_document
from dtrain_dagster.search.run import halving_share, plan_search
from dtrain_dagster.search.trials import Pruner, SearchSettings, Trial, TrialState
from trainer.config import ConfigError, DatasetRef, FactoryConfig, JobConfig

BASE = JobConfig(job_id="base", run_dir="/tmp/base", dataset=DatasetRef(uri="/tmp/data", dataset_id="d1"))


def trial(number: int, scores: tuple[float, ...], first: float, usd: float) -> Trial:
    times = tuple(first + 10.0 * place for place in range(len(scores)))
    return Trial(
        number=number, values={}, of=4, scores=scores, times=times, steps=tuple(range(len(scores))), usd=usd,
        state=TrialState.COMPLETE, node_seconds=60.0,
    )  # fmt: skip


def test_what_each_improvement_cost_adds_up_to_the_dollars_until_then() -> None:
    trials = [
        trial(0, (1.0, 0.8, 0.6, 0.5), 10.0, 4.0), trial(1, (0.9, 0.7, 0.4, 0.3), 50.0, 4.0),
        trial(2, (), 0.0, 1.0), trial(3, (0.9, 0.6), 20.0, 2.0),
    ]  # fmt: skip
    assert improvements(trials, 1.0) == [
        {"trial": 3, "score": 0.6, "usd": 3.0, "gained": None, "usd_since": 3.0},
        {"trial": 0, "score": 0.5, "usd": 7.0, "gained": pytest.approx(0.1), "usd_since": 4.0},
        {"trial": 1, "score": 0.3, "usd": 11.0, "gained": pytest.approx(0.2), "usd_since": 4.0},
    ]
    assert [item["trial"] for item in improvements(trials, -1.0)] == [3, 0]


def test_the_plan_says_at_most_and_expected() -> None:
    settings = SearchSettings(trials=10, pruner=Pruner.asha)
    plan = plan_search(settings, USUAL, 3600.0, 2, None)
    assert plan.trial_usd == pytest.approx(USUAL.total)
    assert plan.at_most_usd == pytest.approx(10 * USUAL.total)
    assert plan.expected_usd < plan.at_most_usd
    assert len(plan.lines) == 2
    assert plan_search(settings, USUAL, 3600.0, 2, 50.0).at_most_usd == 50.0
    everything = plan_search(replace(settings, pruner=Pruner.none), USUAL, 3600.0, 2, None)
    assert everything.expected_usd == everything.at_most_usd


@pytest.mark.parametrize(("of", "share"), [(1, 1.0), (3, (1 + 2 / 3) / 3), (9, (1 + 2 / 3 + 6 / 9) / 9)])
def test_halving_does_what_is_left_at_each_rung(of: int, share: float) -> None:
    assert halving_share(of) == pytest.approx(share)


class TestSettingsFile:
    """The file of the best trial, as a training takes it."""

    def written(self, tmp_path: Path) -> str:
        values = {"training.learning_rate": 0.1, "model.factory": "lstm", "model.args.layers": 2}
        found = replace(trial(3, (0.5,), 0.0, 1.0), values=values)
        path = tmp_path / "best.json"
        path.write_text(json.dumps(settings_document("mine", SearchSettings(), found, BASE)))
        return str(path)

    def test_it_sets_what_was_varied(self, tmp_path: Path) -> None:
        tuned = read_tuned(self.written(tmp_path))
        assert tuned.settings_for(BASE, ()) == ({"learning_rate": 0.1}, [])
        assert tuned.parts_for(BASE) == {"model": {"factory": "lstm", "args": {"layers": 2}}}

    def test_what_is_stated_comes_first_and_is_told(self, tmp_path: Path) -> None:
        used, [said] = read_tuned(self.written(tmp_path)).settings_for(BASE, {"learning_rate"})
        assert used == {}
        assert "training.learning_rate is used as stated, not as found" in said

    def test_another_model_than_was_searched_is_refused(self, tmp_path: Path) -> None:
        tuned = read_tuned(self.written(tmp_path))
        found = replace(BASE, model=FactoryConfig(factory="lstm", args={"layers": 2}))
        assert tuned.parts_for(found)  # the one that was found
        with pytest.raises(ConfigError, match="were searched from model"):
            tuned.parts_for(replace(BASE, model=FactoryConfig(factory="transformer")))

    def test_what_no_search_writes_is_refused(self, tmp_path: Path) -> None:
        path = Path(self.written(tmp_path))
        document = json.loads(path.read_text())
        for wrong in ({"training": {"learning_rat": 1.0}}, {"model": {"args": {}}}, {"tracking": {}}):
            path.write_text(json.dumps(document | wrong))
            with pytest.raises(ConfigError, match="is not something that `dtrain search` writes"):
                read_tuned(str(path))
