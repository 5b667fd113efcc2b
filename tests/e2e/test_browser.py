"""What a person does: open the Dagster UI in a real browser, press Materialize, watch, and terminate another run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from .chromium import BROWSER_TEST, chromium, patient_page, shot
from .conftest import Dagster, wait_for

pytestmark = [*BROWSER_TEST, pytest.mark.timeout(600)]
ENDED = ("SUCCESS", "FAILURE", "CANCELED")


@pytest.fixture(scope="module")
def page(dagster: Dagster) -> Iterator[Page]:
    with chromium() as browser:
        yield patient_page(browser, viewport={"width": 1600, "height": 1000})


def runs(dagster: Dagster) -> list[dict[str, str]]:
    text = "{ runsOrError { ... on Runs { results { runId status } } } }"
    return dagster.query(text)["runsOrError"]["results"]


def test_press_materialize_and_watch(dagster: Dagster, page: Page):
    before = {run["runId"] for run in runs(dagster)}
    page.goto(f"{dagster.url}/locations/dtrain/jobs/train")
    page.locator('button:has-text("Materialize all")').first.click()
    started = lambda: [run for run in runs(dagster) if run["runId"] not in before]  # noqa: E731
    [run] = wait_for(started, 30, "the run that the button starts")
    page.goto(f"{dagster.url}/runs/{run['runId']}")
    page.get_by_text("trained_checkpoint").first.wait_for()
    wait_for(lambda: dagster.observations("trained_checkpoint"), 150, "live progress")
    shot(page, "run")
    wait_for(lambda: dagster.status(run["runId"]) in ENDED, 240, "the run to end")
    assert dagster.materializations("trained_checkpoint")
    assert dagster.materializations("performance_report")
    assert dagster.materializations("registered_model")

    page.goto(f"{dagster.url}/assets/trained_checkpoint")
    page.get_by_text("facts", exact=True).first.wait_for()
    row = page.locator("tr", has=page.get_by_text("curves", exact=True)).first
    row.get_by_text("[Show Markdown]").click()
    picture = page.locator('[role="dialog"] img[src^="data:image/svg+xml"]').first
    picture.wait_for()
    assert picture.evaluate("image => image.complete && image.naturalWidth > 100")
    shot(page, "checkpoint")
    page.goto(f"{dagster.url}/assets/registered_model?view=lineage&lineageScope=upstream&lineageDepth=5")
    for asset in ("stock_prices", "sharded_dataset", "cost_estimate", "trained_checkpoint", "registered_model"):
        page.get_by_text(asset, exact=True).first.wait_for()
    shot(page, "lineage")


@pytest.mark.long  # the same as in test_dagster.py, but by the button of Dagster's page
def test_terminate_from_the_page(dagster: Dagster, page: Page):
    config = {"ops": {"cost_estimate": {"config": {"epochs": 400, "seed": 7}}}}
    run_id = dagster.launch("cost_estimate", "trained_checkpoint", config=config)
    wait_for(
        lambda: any(seen["runId"] == run_id for seen in dagster.observations("trained_checkpoint")), 120, "progress"
    )
    page.goto(f"{dagster.url}/runs/{run_id}")
    page.locator('button:has-text("Terminate")').first.click()
    page.locator('[role="dialog"] button:has-text("Terminate")').last.click()
    wait_for(lambda: dagster.status(run_id) in ENDED, 60, "the run to end")
    assert dagster.status(run_id) in ("CANCELED", "FAILURE")
    wait_for(lambda: not dagster.project.processes(), 20, "every process of the job to be gone")
    assert all(made["runId"] != run_id for made in dagster.materializations("trained_checkpoint"))
