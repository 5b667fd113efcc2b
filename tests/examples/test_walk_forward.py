"""The example of a walk forward: two years of a small price file, to a report; and what a report concludes."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

from dtrain_dagster.cli.main import main
from examples.walk_forward import definitions
from examples.walk_forward.definitions import defs
from examples.walk_forward.report import joined_gain, judge_years, verdict
from tests.e2e.conftest import small_prices


class InThisProcess:
    """The commands of the example: a training is a process of its own, and what it has cost is asked for here."""

    PIPE, STDOUT, Popen = subprocess.PIPE, subprocess.STDOUT, subprocess.Popen

    @staticmethod
    def run(command: list[str], **options: Any) -> Any:
        assert Path(command[0]).name == "dtrain"
        return CliRunner().invoke(main, command[1:], catch_exceptions=False)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_year_is_trained_once_and_all_years_are_judged_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(definitions, "subprocess", InThisProcess)
    settings = {"HOME": str(tmp_path / "home"), "THREADS_PER_RANK": "1", "OPTIONS": "command_tracking=off"}
    for name, value in settings.items():
        monkeypatch.setenv(f"DTRAIN_{name}", value)
    walk = {"prices": str(small_prices(tmp_path)), "window": 10, "valid_years": 1, "options": ["--epochs", "2"]}
    config = {"resources": {"walk": {"config": walk}}}
    whole, one_year = defs.resolve_implicit_global_asset_job_def(), defs.resolve_job_def("walk_forward")
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        whole.execute_in_process(config, instance=instance, asset_selection=[dg.AssetKey("prices")])

        def make(year: str) -> dg.ExecuteInProcessResult:
            return one_year.execute_in_process(config, instance=instance, partition_key=year)

        make("2016")
        [trained] = (tmp_path / "home" / "storage" / "jobs").iterdir()
        chosen = [dg.AssetKey("year_dataset")]
        dataset = whole.execute_in_process(config, instance=instance, asset_selection=chosen, partition_key="2017")
        digest = Path(dataset.output_for_node("year_dataset")).name[:8]
        # As if 2017 had been trained before: the same settings and data are the same job, which is not bought twice.
        bought = trained.with_name(f"{trained.name.rpartition('-2016-')[0]}-2017-{digest}")
        shutil.copytree(trained, bought)
        before = {path: path.stat().st_mtime_ns for path in bought.rglob("*")}
        done = make("2017")
        assert {path: path.stat().st_mtime_ns for path in bought.rglob("*")} == before, "bought once"
        made = {event.asset_key.path[0]: event for event in done.get_asset_materialization_events()}
        assert made["trained_year"].partition == "2017"
        report: Any = made["walk_forward_report"].materialization.metadata["report"].value
        assert [item["year"] for item in report["years"]] == [2016, 2017]
        assert {2015, 2018} <= set(report["missing_years"])
        assert set(report["all"]["gains"]) == {"constant", "last_value", "ewma", "har", "har_x", "ridge"}
        assert report["total_usd"] == pytest.approx(sum(item["usd"] for item in report["years"]))
        [check] = done.get_asset_check_evaluations()
        assert (check.passed, "2 test year(s): at least 5 are judged" in str(check.metadata)) == (False, True)


def year(number: int, gain: float, t: float | None, windows: int = 100, **more: Any) -> dict[str, Any]:
    gains = {name: {"nats": gain, "t": t} for name in ("ridge", "ewma", "har_x")}
    figures = {"year": number, "windows": windows, "nll": -2.0, "coverage_90": 0.9, "gains": gains, "usd": 0.5}
    return figures | {"price": "as billed", "settings": "abc", "job_id": f"walk-{number}"} | more


def test_the_years_gain_is_a_mean_over_windows_and_its_error_that_of_independent_years() -> None:
    equal = joined_gain([(100, {"nats": 0.02, "t": 2.0})] * 4)
    assert equal["nats"] == pytest.approx(0.02)
    assert equal["t"] == pytest.approx(4.0), "four times the days, half the error"
    uneven = joined_gain([(300, {"nats": 0.01, "t": 1.0}), (100, {"nats": -0.01, "t": -0.5})])
    assert uneven["nats"] == pytest.approx(0.005)
    assert uneven["t"] == pytest.approx(0.005 / math.hypot(0.75 * 0.01, 0.25 * 0.02))
    assert joined_gain([(100, {"nats": 0.01, "t": None})]) == {"nats": pytest.approx(0.01), "t": None}


def test_a_model_passes_over_five_years_of_the_same_settings() -> None:
    good = [year(number, 0.01, 2.0) for number in range(2010, 2015)]
    report = judge_years(good[::-1], range(2010, 2016))
    assert (report["reasons"], report["missing_years"], report["total_usd"]) == ([], [2015], 2.5)
    assert verdict(report).startswith("Over 5 test year(s): +0.0100 (t 4.5) nats over ridge, won in 5.")
    assert judge_years([*good[:4], year(2014, 0.01, 2.0, settings="xyz")], [])["reasons"] == [
        "the years were made with other settings"
    ]
    weak = judge_years([year(number, -0.01, -2.0) for number in range(2010, 2015)], [])["reasons"]
    assert weak[0] == "ridge is better beyond chance (-0.0100 (t -4.5))"
    assert "it is not better than ewma beyond chance" in weak[1]
    narrow = judge_years([year(number, 0.01, 2.0, coverage_90=0.8) for number in range(2010, 2015)], [])["reasons"]
    assert narrow == ["the 90 % interval covers 0.800, outside [0.87, 0.93]"]
    with pytest.raises(ValueError, match="no test year was made yet"):
        judge_years([], [2010])
