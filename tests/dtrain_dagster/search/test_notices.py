"""How a search is opened again, and that people are told once that it has ended, by a real web hook on loopback."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.search.results import summary
from dtrain_dagster.search.run import Measured, Search, SearchRequest, open_search
from dtrain_dagster.search.space import SpaceError
from dtrain_dagster.search.trials import Pruner, SearchSettings, TrialSeconds
from tests.webhook import web_hook
from trainer.config import DatasetRef, JobConfig

RESULT: dict[str, Any] = {
    "name": "rates", "trials": [{}, {}, {}], "counts": {"complete": 1, "pruned": 2}, "usd": 0.5,
    "measuring_usd": 0.0, "metric": "valid_loss",
    "best": {"trial": 2, "score": -2.08, "values": {"learning_rate": 0.01}}, "settings_file": "/s/best.json",
    "planned": {"at_most_usd": 1.0, "expected_usd": 0.75}, "improvements": [],
}  # fmt: skip


USUAL = TrialSeconds(startup=1, training=1, of=1, finish=1)


def request_in(home: Path) -> SearchRequest:
    base = JobConfig(job_id="search", run_dir=f"{home}/jobs/search", dataset=DatasetRef(uri="/tmp/data"))
    return SearchRequest(
        name="rates", space={"training.learning_rate": {"low": 0.1, "high": 0.2}}, settings=SearchSettings(),
        base=base, samples={}, budget_usd=None, nodes=1,
        usd_per_node_hour=3.6,
    )  # fmt: skip


def test_a_search_of_an_older_version_is_refused_before_its_record_is_touched(tmp_path: Path) -> None:
    request = request_in(tmp_path)
    for _ in range(2):  # begun, and gone on with
        open_search(tmp_path, request, None, {}, lambda: Measured(USUAL, 0.1))  # type: ignore[arg-type]
    path = tmp_path / "searches" / "rates" / "search.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in document.items() if name != "measured_by"}))
    with pytest.raises(SpaceError, match=r"begun by an older version.*--show rates"):
        open_search(tmp_path, request, None, {}, lambda: Measured(USUAL, 0.1))  # type: ignore[arg-type]


def test_a_space_of_few_trials_is_planned_for_them_and_not_for_as_many_as_there_may_be(tmp_path: Path) -> None:
    space = {"training.learning_rate": [0.1, 0.2], "training.epochs": {"low": 1, "high": 3}}
    request = replace(request_in(tmp_path), space=space, settings=SearchSettings(trials=32, pruner=Pruner.none))
    search = Search(tmp_path, request, None, {}, Measured(USUAL))  # type: ignore[arg-type]
    assert search.plan.at_most_usd == pytest.approx(6 * search.plan.trial_usd)
    assert search.plan.lines[0].startswith("6 trials")
    assert replace(request, settings=SearchSettings(trials=4)).count_trials() == 4
    assert request_in(tmp_path).count_trials() == 32


def test_the_end_of_a_search_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_in(tmp_path)
    search = Search(tmp_path, request, None, {}, Measured(USUAL))  # type: ignore[arg-type]
    with web_hook() as (url, heard):
        monkeypatch.setenv("DTRAIN_NOTIFY", url)
        for _ in range(2):  # a search that has ended is begun again: it goes on, and ends at once
            search._tell_end(RESULT)
    assert [item["title"] for item in heard] == ["dtrain: search rates has ended"]
    assert heard[0]["message"].splitlines() == [
        "best: trial 2, valid_loss -2.08 with learning_rate = 0.01",
        "3 trials (1 complete, 2 pruned) cost $0.5000; the plan was at most $1.00, with $0.7500 expected",
        "use it: dtrain train … --settings /s/best.json",
    ]
    none = {**RESULT, "best": None, "trials": [{"reason": "out of memory"}]}
    assert summary(none)[0] == "no trial was evaluated (out of memory): see `dtrain logs` of one for why"
