"""The list of all jobs in a real Chromium: what a user finds, by mouse, keyboard and address."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from tests.abuse.dashboard_load import write_jobs
from tests.dtrain_dagster.told_events import HOSTILE, told, write_run
from trainer.rundir import RunDir

from .chromium import BROWSER_TEST, patient_page, shot
from .conftest import Project, dashboard_of, make_project, wait_for

pytestmark = [*BROWSER_TEST, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A home with 120 trainings that have ended, one that runs, and a hostile one that failed."""
    made = make_project(tmp_path_factory.mktemp("home"))
    write_jobs(made.jobs, 120, time.time())
    write_run(made.jobs, "live", told(60), state="running")
    tell(write_run(made.jobs, "broken", told(20), state="failed"), "failed")
    return made


def tell(rundir: RunDir, state: str) -> None:
    times = {"started_at": time.time() - 60, "ended_at": time.time()}
    rundir.write_json("status.json", {"state": state, "message": HOSTILE, "launch": 1, **times})


@pytest.fixture(scope="module")
def url(project: Project) -> Iterator[str]:
    with dashboard_of(project) as address:
        yield address


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A laptop's window, in which nothing may go wrong, and which asks this server only."""
    page = patient_page(browser, viewport={"width": 1280, "height": 800}, color_scheme="light")
    complaints: list[str] = []
    page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(f"a script of an event ran: {dialog.message}"))
    yield page
    page.close()
    assert complaints == []


def count(page: Page, wanted: int) -> None:
    wait_for(lambda: page.locator("#rows tr").count() == wanted, 30, f"{wanted} rows")


def test_any_job_is_found_and_the_list_follows_what_happens(project: Project, url: str, page: Page):
    page.goto(url)
    page.get_by_text("122 jobs, $").wait_for()
    count(page, 100)
    live = page.locator("tr", has=page.get_by_role("link", name="live"))
    wait_for(lambda: "slow input on rank 1" in live.inner_text(), 30, "what holds it up")
    assert page.locator("#rows tr").first.get_attribute("data-state") == "running"
    assert HOSTILE in page.locator("tr", has=page.get_by_role("link", name="broken")).inner_text()
    page.get_by_role("link", name="show more").click()
    count(page, 122)

    page.get_by_label("state").select_option("failed")
    page.get_by_role("button", name="Show").click()
    count(page, 7)
    assert set(page.locator("#rows td.state").all_inner_texts()) == {"failed"}
    page.get_by_role("searchbox").fill("no job is called so")
    page.keyboard.press("Enter")
    page.get_by_text("No job matches.").wait_for()
    page.get_by_role("searchbox").fill("-00000064")  # number 100
    page.keyboard.press("Enter")
    count(page, 1)
    page.reload()
    count(page, 1)

    page.goto(f"{url}find/live")
    link = page.get_by_role("link", name="live")
    link.focus()
    tell(RunDir(str(project.jobs / "live")), "cancelled")
    page.locator('#rows tr[data-state="cancelled"]').wait_for()
    assert page.evaluate("document.activeElement.id") == "job-live", "the focus stays where it was"
    page.keyboard.press("Enter")
    page.wait_for_url(f"{url}jobs/live")


PAGES = {
    "table": ("", "#rows tr"),
    "job": ("jobs/train-00000001-00000001", "#headline .figure"),
    "job-failed": ("jobs/broken", "#failure"),
}


@pytest.mark.parametrize(
    "name",
    [name if name in ("table", "job") else pytest.param(name, marks=pytest.mark.long) for name in PAGES],
)
def test_pages_are_accessible_and_fit_every_screen(url: str, page: Page, name: str):
    """Loaded on the smallest and on the largest one, and then made as wide as a laptop."""
    address, there = PAGES[name]
    for width, theme, is_loaded in (
        (360, "dark", True), (1280, "dark", False), (3840, "light", True), (1280, "light", False),
    ):  # fmt: skip
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": width, "height": 900})
        if is_loaded:
            page.goto("about:blank")
            page.goto(f"{url}{address}")
        page.locator(there).first.wait_for()
        fits = "document.documentElement.scrollWidth <= window.innerWidth"
        wait_for(lambda fits=fits: page.evaluate(fits), 10, f"the page to fit into {width} pixels")
        found = Axe().run(page)
        rules = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found.response["violations"]]
        assert rules == [], json.dumps(rules, indent=1)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        shot(page, f"{name}-{width}-{theme}")
