"""The page of one job in a real Chromium: a failed job, its logs, and orders by hand and by keyboard."""

# ruff: noqa: F811 - fixtures of the neighbour
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from harness.small_job import write_dataset
from tests.dtrain_dagster.told_events import HOSTILE, told, write_run

from .chromium import BROWSER_TEST, shot
from .conftest import Project, dashboard_of, wait_for
from .test_dashboard_page import figure, page, project  # noqa: F401

pytestmark = [*BROWSER_TEST, pytest.mark.timeout(600)]
TOKEN = "of-this-test-alone-4711"
WIDTHS = (360, 1280, 2560)
MESSAGE = f"rank 1 on node 1 failed first (exit code 1); the end of its log:\n{HOSTILE}\nValueError: the batch is empty"


@pytest.fixture
def url(project: Project) -> Iterator[str]:
    """A dashboard that asks for a token before it takes orders."""
    with dashboard_of(project, "--token", "env:DASHBOARD_TOKEN", DASHBOARD_TOKEN=TOKEN) as address:
        yield address


def fits(page: Page) -> None:
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        wait_for(lambda: page.evaluate("document.documentElement.scrollWidth <= innerWidth"), 20, f"to fit {width} px")
    page.set_viewport_size({"width": 1280, "height": 800})


def test_a_failed_job_says_why_first_and_its_address_keeps_what_is_looked_at(
    project: Project,
    url: str,
    page: Page,
) -> None:
    rundir = write_run(project.jobs, "broken", told(8), state="failed")
    rundir.write_json("status.json", {"state": "failed", "message": MESSAGE, "exit_code": 1, "launch": 1})
    lines = [f"2026-01-01 10:00:{at % 60:02d} step {at}" for at in range(300)]
    rundir.storage.write("logs/node-0.log", "\n".join([*lines, "password=PLANTEDPLANTED", ""]).encode())
    rundir.storage.write("logs/node-1.log", f"{HOSTILE}\nValueError: the batch is empty\n".encode())
    page.goto(f"{url}jobs/broken")
    failure = page.locator("#failure")
    failure.get_by_text("failed: exit code 1").wait_for()
    assert failure.locator(".cause").inner_text() == "ValueError: the batch is empty"
    assert HOSTILE in failure.locator("pre").inner_text()
    above = page.evaluate("document.querySelector('#failure').getBoundingClientRect().top")
    assert above < page.evaluate("document.querySelector('#headline').getBoundingClientRect().top")
    shot(page, "job-failed")
    fits(page)

    failure.get_by_role("link", name="all of its log").click()
    page.locator("#log-lines").get_by_text(HOSTILE).wait_for()
    assert page.url.endswith("#tab=logs&node=1")
    page.select_option("#log-node", "")
    page.get_by_text("303 lines", exact=True).wait_for()
    assert "PLANTED" not in page.locator("#log-lines").inner_text()
    page.reload()
    page.get_by_text("303 lines", exact=True).wait_for()
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "tabs"
    assert "tab=logs" in page.url, "whoever skips stays in the part that is open"
    with open(rundir.storage.local_path("logs/node-1.log"), "a") as file:
        file.writelines(f"flood {number}\n" for number in range(1500))
    page.get_by_text("Some lines are left out here").wait_for()
    page.get_by_text("1,303 lines", exact=True).wait_for()
    fits(page)

    page.locator("#tab-logs").focus()
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.id") == "tab-charts"
    page.keyboard.press("ArrowRight")
    page.get_by_text("There is no verdict on the model").wait_for()
    page.keyboard.press("ArrowRight")
    page.locator("#part-settings").get_by_text('"factory": "tcn"').wait_for()
    fits(page)
    assert page.complaints == []  # type: ignore[attr-defined]


@pytest.mark.long
def test_a_training_is_cancelled_and_resumed_from_its_page(
    project: Project,
    url: str,
    page: Page,
    tmp_path: Path,
) -> None:
    dataset = write_dataset(tmp_path / "dataset")
    started = project.cli(
        *("dtrain", "train", "--dataset", str(dataset), "--nodes", "1", "--name", "live", "--epochs", "4000"),
        *("--set", "training.log_frequency=2", "--detach"),
    )
    assert started.returncode == 0, started.stdout
    page.goto(f"{url}jobs/live")
    wait_for(lambda: figure(page, "state") == "running", 120, "the job to train")
    page.locator("#order-cancel:enabled").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("token").fill("another")
    dialog.get_by_role("button", name="Cancel the job").click()
    page.get_by_text("the token is missing or wrong").wait_for()
    page.locator("#order-cancel").click()
    page.keyboard.press("Escape")
    assert figure(page, "state") == "running", "who leaves the question cancels nothing"
    page.locator("#order-cancel").click()
    dialog.get_by_label("token").fill(TOKEN)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_text("job live: cancelled").wait_for()
    wait_for(lambda: figure(page, "state") == "cancelled", 60, "the page to say so")
    page.locator("#order-resume:enabled").click()
    dialog.get_by_role("button", name="Resume the job").click()
    page.get_by_text("Resume the job: done").wait_for()
    wait_for(lambda: figure(page, "state") == "running", 120, "the job to train again")
    page.get_by_text("over 2 launches").first.wait_for()
    assert [text for text in page.complaints if "401" not in text] == []  # type: ignore[attr-defined]
    audit = "".join(path.read_text() for path in Path(project.env["DTRAIN_HOME"], "audit").iterdir())
    assert [json.loads(line)["operation"] for line in audit.splitlines()][:2] == [
        f"{order} from the dashboard" for order in ("cancel", "resume")
    ]
    assert TOKEN not in audit
