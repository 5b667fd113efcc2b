"""What `dtrain ui mlflow` and `dtrain ui jobs` print at their start, and the list of runs that the link opens, in a
real Chromium."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.tables import copy_tables
from trainer.observability.mlflow_sink import KIND_TAG, prepare_list

from .chromium import BROWSER_TEST, chromium, patient_page, shot
from .conftest import BIN, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@contextmanager
def served(home: Path, name: str) -> Iterator[tuple[str, Path]]:
    """The first line that a command prints, and the file with what it says beside that."""
    said = home / f"{name}.txt"
    with said.open("w") as errors:
        process = subprocess.Popen(
            [str(BIN / "dtrain"), "ui", name, "--port", "0"],
            cwd=ROOT, env=os.environ | {"DTRAIN_HOME": str(home)}, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), said
        finally:
            process.terminate()
            assert process.wait(30) is not None


def home_with_a_run(home: Path) -> str:
    """A home whose MLflow has a run as an older version wrote it, in an experiment without a view; its id."""
    from mlflow.tracking import MlflowClient

    home.mkdir()
    copy_tables(home / "mlflow.db")
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    experiment = client.create_experiment(
        "dtrain", str(home / "mlartifacts"), tags={KIND_TAG: "custom_model_development"}
    )
    run = client.create_run(experiment, run_name="one", tags={"gate": "passed", "nodes": "3"}).info.run_id
    client.log_param(run, "model", "har_tcn")
    for name in ("valid/loss", "test/loss", "cost/total_usd", "baseline/har_nll"):
        client.log_metric(run, name, 0.5)
    client.set_terminated(run)
    return experiment


def test_a_dashboard_says_what_it_is(tmp_path: Path) -> None:
    with served(tmp_path, "jobs") as (line, _):
        assert line.startswith("dashboard: http://127.0.0.1:")


def test_a_home_without_an_experiment_opens_mlflows_first_page_and_nothing_warns(tmp_path: Path) -> None:
    copy_tables(tmp_path / "mlflow.db")
    with served(tmp_path, "mlflow") as (line, said):
        assert line.startswith("MLflow: http://127.0.0.1:")
        assert "#" not in line
        assert "Deprecat" not in said.read_text()


@pytest.mark.browser
@BROWSER_TEST[-1]
def test_the_list_of_runs_opens_with_the_columns_by_which_trainings_are_compared(tmp_path: Path) -> None:
    experiment = home_with_a_run(tmp_path / "home")
    with served(tmp_path / "home", "mlflow") as (line, _), chromium() as browser:
        url = line.removeprefix("MLflow: ")
        assert url.endswith(f"/#/experiments/{experiment}/runs?viewStateShareKey=dtrain")
        page = patient_page(browser, viewport={"width": 1900, "height": 900})
        page.goto(url)
        for name in ("model", "valid/loss", "test/loss", "cost/total_usd", "gate", "nodes"):
            page.locator('[role="columnheader"]', has_text=name).first.wait_for()
        page.get_by_text("har_tcn").first.wait_for()
        assert page.locator('[role="columnheader"]', has_text="har_nll").count() == 0
        shot(page, "mlflow-runs")


def test_the_kind_that_a_person_has_chosen_stays_and_what_is_there_is_not_written_again() -> None:
    written: dict[str, str] = {}

    class Client:
        def set_experiment_tag(self, experiment_id: str, name: str, value: str) -> None:
            written[name] = value

    prepare_list(Client(), "1", {KIND_TAG: "genai_development"})  # type: ignore[arg-type]
    assert list(written) == ["mlflow.sharedViewState.dtrain"]
    prepare_list(Client(), "1", dict(written, **{KIND_TAG: "mine"}))  # type: ignore[arg-type]
    assert len(written) == 1
