"""The walk forward's decisions: which years there are, what a report says of them, and what a gate makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import dagster as dg
import numpy as np
import pytest

from dtrain_dagster.assets.pipeline import STOCK
from dtrain_dagster.assets.walk_forward import TrainedYear, start_of, year_page, year_partitions
from dtrain_dagster.assets.walk_forward_gate import (
    judge_by_walk_forward,
    read_report,
    refuse_without_report,
    report_path,
    training_settings,
)
from dtrain_dagster.assets.walk_forward_report import report_document, report_page, year_rows
from dtrain_dagster.automation.capacity_queue import PARTITION_TAG, new_ticket
from dtrain_dagster.costs.estimate import Estimate, Work
from dtrain_dagster.costs.interval import Interval
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.definitions import build_defs
from dtrain_dagster.reports.walk_forward_charts import walk_forward_chart
from dtrain_dagster.sensors.newest_year import newest_test_year
from dtrain_dagster.sensors.queue import _request
from dtrain_dagster.settings.environment import Settings, SettingsError
from dtrain_dagster.settings.walk_forward import WalkForwardSettings, read_walk_forward
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames
from tests.dtrain_dagster.page_order import HEAD, check_order, kind_of
from trainer.evaluation.gate import Gate
from trainer.evaluation.walk_forward import YearScores

TRAINED = dg.AssetKey(["walk_forward", "trained_checkpoint"])
SETTINGS: dict[str, Any] = {
    "model": {"factory": "tcn", "args": {}},
    "loss": {"factory": "student_t", "args": {}},
    "training": {"epochs": 6, "seed": 0},
    "window": 60,
    "horizon": 5,
    "valid_years": 2,
    "warm_start": False,
}


def trained(year: int, usd: float = 0.25, gain: float = 0.02, **settings: Any) -> TrainedYear:
    random, days = np.random.default_rng(year), 120
    nll = -2 + 0.3 * random.standard_normal(days)
    scores = YearScores(
        year=year,
        days=np.datetime64(f"{year}-01-02") + np.arange(days),
        windows=np.full(days, 20),
        nll=nll,
        coverage_90=np.full(days, 0.9),
        baselines={name: nll + gain + 0.02 * random.standard_normal(days) for name in ("ewma", "har_x", "ridge")},
        turbulent=np.arange(days) > 60,
    )
    return TrainedYear(
        scores=scores,
        job_id=f"job-{year}",
        run_dir="",
        dataset_id="",
        usd=usd,
        price_words="stand-in price",
        seconds=30.0,
        is_warm=bool(settings.get("warm_start")),
        settings=SETTINGS | settings,
    )


def test_a_report_tells_missing_years_and_every_dollar() -> None:
    document = report_document([trained(2003), trained(2001, usd=0.5)], range(2000, 2005))
    assert document["years"] == [2001, 2003]
    assert document["missing_years"] == [2000, 2002, 2004]
    assert document["usd"] == {"total": 0.75, "words": "stand-in price", "by_year": {"2001": 0.5, "2003": 0.25}}
    assert document["jobs"] == {"2001": "job-2001", "2003": "job-2003"}
    said = "\n".join(document["notes"])
    assert "$0.75" in said
    assert "Missing: 2000, 2002, 2004." in said
    assert [row["year"] for row in year_rows(document)] == ["2001", "2003", "all"]
    assert "at least 5 are judged" in document["gate"]["reasons"][0]
    json.dumps(document, allow_nan=False)


def test_a_report_is_shown_in_the_order_of_reading_with_all_years_first(tmp_path: Path) -> None:
    years = [trained(year) for year in range(2000, 2015)]
    document = report_document(years, range(2000, 2015))
    path = tmp_path / "stock.json"
    page = report_page(years, document, path, {"dashboard": "http://127.0.0.1:8060/#q=walk_forward"})
    check_order(page, links=1)
    assert page["verdict"] == document["notes"][0]
    shown = [record.data["year"] for record in page["by_year"].records]
    assert shown == ["all", *map(str, range(2014, 2005, -1))], "the newest of fifteen years"
    assert len((tmp_path / "stock.csv").read_text().splitlines()) == 1 + 15 + 1
    best = document["best_baseline"]
    assert page[f"gain_over_{best}"] == round(document["all"]["gains"][best]["nats"], 6)
    assert page["total_usd"] == 0.25 * 15


def test_a_year_is_shown_in_the_order_of_reading_the_hardest_baseline_first() -> None:
    page = year_page(trained(2003), "http://127.0.0.1:8060/jobs/job-2003")
    kinds = [kind_of(name, value) for name, value in page.items()]
    assert kinds[: len(HEAD) + 1] == [*HEAD, "link"]
    scores = [record.data["nll"] for record in page["baselines"].records]
    assert scores == sorted(scores)
    assert page["verdict"].startswith(f"NLL {page['nll']:.4f} in 2003: +0.0")
    assert page["verdict"].endswith("; $0.2500 (stand-in price).")


def test_five_years_of_one_kind_pass_and_of_two_kinds_do_not() -> None:
    years = [trained(year) for year in range(2000, 2005)]
    assert report_document(years, range(2000, 2005))["gate"] == {"passed": True, "reasons": []}
    odd = trained(2002, training={"epochs": 3, "seed": 0})
    document = report_document([*years[:2], odd, *years[3:]], range(2000, 2005))
    assert document["gate"]["reasons"] == ["the years differ: 2002 has training.epochs = 3, not 6"]


def test_the_first_year_of_warm_starts_has_none_before_it() -> None:
    years = [trained(2000), *(trained(year, warm_start=True) for year in range(2001, 2005))]
    assert report_document(years, range(2000, 2005))["differences"] == []
    mixed = [*years[:3], trained(2003), years[4]]
    assert report_document(mixed, range(2000, 2005))["differences"] == ["2003 has warm_start = False, not True"]


@pytest.mark.parametrize("years", [(2001, 2000), (2000,)])
def test_the_chart_is_drawn_of_the_baselines_that_all_years_have(years: tuple[int, ...]) -> None:
    chart = walk_forward_chart([trained(year).scores for year in years], ("ridge", "har_x", "lightgbm"))
    root = ElementTree.fromstring(chart)
    assert root.tag.endswith("svg")
    with pytest.raises(ValueError, match="no baseline"):
        walk_forward_chart([trained(year).scores for year in years], ("lightgbm",))


@pytest.fixture
def plan() -> TrainingPlan:
    seconds = usd = Interval(low=1.0, expected=2.0, high=3.0)
    return TrainingPlan(
        fingerprint="ab",
        job={
            "dataset": {"uri": "", "dataset_id": "cd"},
            "model": {"factory": "tcn", "args": {}},
            "loss": {"factory": "student_t", "args": {}},
            "training": {"epochs": 6, "seed": 0, "max_node_seconds": 12.0, "start_from": None},
        },
        sku="Standard_NC6s_v3",
        tier="dedicated",
        node_count=1,
        processes_per_node=1,
        work=Work(steps=60, evaluations=1, checkpoints=1),
        estimate=Estimate(seconds=seconds, usd=usd, usd_per_node_hour=3.06, node_count=1),
        basis="",
        price_note="",
    )


def test_a_champion_needs_the_walk_forward_of_its_own_settings(plan: TrainingPlan) -> None:
    passed, own, manifest = Gate(True, ()), training_settings(plan), {"window": 60, "horizon": 5}
    years = [trained(year, **own) for year in range(2000, 2005)]
    good = report_document(years, range(2000, 2005))
    assert judge_by_walk_forward(passed, good, plan, manifest) == passed
    assert not judge_by_walk_forward(Gate(False, ("its own test",)), good, plan, manifest).passed
    assert "there is no walk_forward_report" in judge_by_walk_forward(passed, None, plan, manifest).reasons[0]
    poor = report_document([trained(year, gain=-0.02, **own) for year in range(2000, 2005)], range(2000, 2005))
    said = "\n".join(judge_by_walk_forward(passed, poor, plan, manifest).reasons)
    assert "walk forward: ridge is better beyond chance" in said
    other = {**own, "training": {**own["training"], "epochs": 60}}
    foreign = report_document([trained(year, **other) for year in range(2000, 2005)], range(2000, 2005))
    verdict = judge_by_walk_forward(passed, foreign, plan, manifest)
    assert verdict == Gate(
        False,
        (
            f"the walk forward judged training.epochs = 60, and this is {own['training']['epochs']}: run the walk "
            "forward with these settings, or train with the others",
        ),
    )
    [other] = judge_by_walk_forward(passed, good, plan, {"window": 30, "horizon": 5}).reasons
    assert other.startswith("the walk forward judged window = 60, and this is 30")


def test_a_report_is_read_where_it_was_written(tmp_path: Path) -> None:
    assert read_report(tmp_path, STOCK_NAMES) is None
    path = report_path(tmp_path, GraphNames("quotes"))
    path.parent.mkdir(parents=True)
    whole = report_document([trained(2000)], [2000])
    path.write_text(json.dumps(whole))
    assert read_report(tmp_path, GraphNames("quotes")) == whole
    assert read_report(tmp_path, STOCK_NAMES) is None
    for damaged in ('{"years": [2000]}', path.read_text()[:-9], "[]", json.dumps({**whole, "settings": {}})):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=r"quotes\.json is damaged .*: materialize quotes/walk_forward_report"):
            read_report(tmp_path, GraphNames("quotes"))


def test_a_gate_without_its_report_is_told_before_anything_is_bought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_without_report(tmp_path, STOCK, "windows")
    monkeypatch.setenv("DTRAIN_GATE", "walk_forward")
    refuse_without_report(tmp_path, STOCK, "rows")
    with pytest.raises(
        dg.Failure, match=r"no .*stock\.json: run the walk forward first \(dagster job backfill -j walk_"
    ):
        refuse_without_report(tmp_path, STOCK, "windows")
    with pytest.raises(dg.Failure, match="has no walk forward: set DTRAIN_GATE=test"):
        refuse_without_report(tmp_path, replace(STOCK, source="folder"), "windows")
    path = report_path(tmp_path, STOCK_NAMES)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(dg.Failure, match=r"DTRAIN_GATE=walk_forward: .* is damaged"):
        refuse_without_report(tmp_path, STOCK, "windows")
    path.write_text(json.dumps(report_document([trained(2000)], [2000])))
    refuse_without_report(tmp_path, STOCK, "windows")


def test_years_follow_the_prices() -> None:
    assert year_partitions(2000, 2022).get_partition_keys() == [str(year) for year in range(2000, 2023)]
    present = year_partitions(2020, None).get_partition_keys()
    assert present[:3] == ["2020", "2021", "2022"]
    assert len(present) > 5
    assert WalkForwardSettings.read().last_year_of("sp500_panel") == 2022
    assert WalkForwardSettings.read().last_year_of("/data/mine.csv") is None
    assert WalkForwardSettings(last_year=2010).last_year_of("sp500_panel") == 2010


def test_years_out_of_order_are_refused_with_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_WALK_FORWARD_LAST_YEAR", "1999")
    with pytest.raises(SettingsError, match=r"FIRST_YEAR=2000 comes after DTRAIN_WALK_FORWARD_LAST_YEAR=1999"):
        read_walk_forward()


@pytest.mark.parametrize(
    ("last", "year"), [("2022-12-28", "2022"), ("2022-01-20", "2021"), ("2022-02-01", "2022"), ("1999-06-01", None)]
)
def test_the_newest_year_has_had_its_first_month(last: str, year: str | None) -> None:
    assert newest_test_year(last, [str(each) for each in range(2000, 2025)]) == year


def test_the_schedule_asks_for_the_newest_year_of_the_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_RETRAIN_BUDGET_USD", "2.5")
    schedule = build_defs(Settings()).resolve_schedule_def("newest_year")
    assert schedule.default_status is dg.DefaultScheduleStatus.STOPPED
    assert schedule.job_name == "walk_forward"
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:

        def tick() -> Any:
            repository = build_defs(Settings()).get_repository_def()
            with dg.build_schedule_context(instance=instance, repository_def=repository) as context:
                return schedule.evaluate_tick(context)

        assert "stock_prices was not made yet" in str(tick().skip_message)
        made = dg.AssetMaterialization(
            "stock_prices", metadata={"last_date": "2021-12-30"}, tags={"dagster/data_version": "abc"}
        )
        instance.report_runless_asset_event(made)
        [request] = tick().run_requests
        assert request.partition_key == "2021"
        assert request.run_key == "walk_forward-2021-abc"  # the same prices ask once
        assert request.run_config["ops"]["walk_forward__cost_estimate"]["config"]["budget_usd"] == 2.5


def test_a_warm_start_needs_the_year_before(tmp_path: Path) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        with pytest.raises(dg.Failure, match="the year before, 2004, was not trained"):
            start_of(instance, TRAINED, "2004")
        record = dg.AssetMaterialization(TRAINED, partition="2004", metadata={"run_dir": str(tmp_path)})
        instance.report_runless_asset_event(record)
        later = dg.AssetMaterialization(TRAINED, partition="2005", metadata={"run_dir": "elsewhere"})
        instance.report_runless_asset_event(later)
        with pytest.raises(dg.Failure, match="holds no model; materialize the year 2004 first"):
            start_of(instance, TRAINED, "2004")
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "model.json").write_text(json.dumps({"file_sha256": "ab" * 32}))
        assert start_of(instance, TRAINED, "2004") == {"start_from": str(tmp_path), "start_sha256": "ab" * 32}


def test_a_year_that_waits_for_capacity_is_started_as_that_year() -> None:
    ticket = new_ticket("run", ["walk_forward/trained_checkpoint"], {}, "none", 0.0, 60.0, tags={PARTITION_TAG: "2007"})
    assert _request(ticket).partition_key == "2007"
    assert _request(replace(ticket, tags={})).partition_key is None
