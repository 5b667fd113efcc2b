"""People are told once that a search has ended, by a real web hook on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.search.results import summary
from dtrain_dagster.search.run import Search, SearchRequest
from dtrain_dagster.search.settings import SearchSettings
from dtrain_dagster.search.trials import TrialSeconds
from tests.webhook import web_hook
from trainer.config import DatasetRef, JobConfig

RESULT: dict[str, Any] = {
    "name": "rates", "trials": [{}, {}, {}], "counts": {"complete": 1, "pruned": 2}, "usd": 0.5, "metric": "valid_loss",
    "best": {"trial": 2, "score": -2.08, "values": {"learning_rate": 0.01}}, "settings_file": "/s/best.json",
    "planned": {"at_most_usd": 1.0, "expected_usd": 0.75}, "improvements": [],
}  # fmt: skip


def test_the_end_of_a_search_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = JobConfig(job_id="search", run_dir=f"{tmp_path}/jobs/search", dataset=DatasetRef(uri="/tmp/data"))
    request = SearchRequest(
        name="rates", space={}, settings=SearchSettings(), base=base, samples={}, budget_usd=None, nodes=1,
        usd_per_node_hour=3.6,
    )  # fmt: skip
    usual = TrialSeconds(startup=1, training=1, of=1, finish=1)
    search = Search(tmp_path, request, None, {}, usual)  # type: ignore[arg-type]
    with web_hook() as (url, heard):
        monkeypatch.setenv("DTRAIN_NOTIFY", url)
        for _ in range(2):  # a search that has ended is begun again: it goes on, and ends at once
            search._tell_end(RESULT)
    assert [item["title"] for item in heard] == ["dtrain: search rates has ended"]
    assert heard[0]["message"].splitlines() == [
        "3 trials (1 complete, 2 pruned) cost $0.5000; the plan was at most $1.00, with $0.7500 expected",
        "best: trial 2, valid_loss -2.08 with learning_rate = 0.01",
        "use it: dtrain train … --settings /s/best.json",
    ]


def test_a_search_without_a_score_says_where_to_look() -> None:
    assert "see `dtrain logs` of one" in summary({**RESULT, "best": None, "counts": {"failed": 3}})[-1]
