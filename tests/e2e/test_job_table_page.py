"""The table of all jobs in a real Chromium: what a user finds, by mouse, keyboard and address."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from dtrain_dagster.support.formatting import dollars
from tests.dtrain_dagster.told_events import HOSTILE, START, event, told, write_run

from .chromium import BROWSER_TEST, patient_page, shot
from .conftest import Project, dashboard_of, make_project, wait_for

pytestmark = [*BROWSER_TEST, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A home with a search of three trials, two trainings that were started by hand, and a hostile one."""
    made = make_project(tmp_path_factory.mktemp("home"))
    for folder in ("fleets/sweep/jobs", "searches/sweep"):
        (made.home / folder).mkdir(parents=True)
    for number in range(3):
        (made.home / f"fleets/sweep/jobs/sweep-000{number}.json").write_text("{}")
        write(
            made.jobs,
            f"sweep-000{number}",
            loss=-2.0 - 0.1 * number,
            ago=7200 + 60 * number,
            learning_rate=0.01 * number,
        )
    write(made.jobs, "older", loss=-3.0, ago=9000)
    write(made.jobs, "broken", loss=None, ago=3600, state="failed", message=HOSTILE)
    write_run(made.jobs, "live", told(60), state="running")
    return made


def write(
    jobs: Path, name: str, loss: float | None, ago: float, state: str = "succeeded", message: str = "", **training: Any
) -> None:
    judged = [] if loss is None else [event("evaluation", START + 9, split="valid", loss=loss, step=50, seconds=0.5)]
    rundir = write_run(jobs, name, [*told(20), *judged], state=state)
    job = rundir.read_json("job.json")
    rundir.write_json("job.json", {**job, "training": {**job["training"], **training}})
    times = {"started_at": time.time() - ago, "ended_at": time.time() - ago + 60}
    rundir.write_json("status.json", {"state": state, "message": message, "launch": 1, **times})
    rundir.write_json("launch.json", {"launch": 1, "sku": "Standard_NC6s_v3", "node_count": 3, "submitted_at": START})
    if loss is not None:
        result = {
            "status": state,
            "steps": 100,
            "samples_seen": 10_000,
            "best_valid_loss": loss,
            "test": {"loss": loss},
        }
        rundir.write_json("result.json", result)


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


def names(page: Page) -> list[str]:
    """The lines of the table: jobs, and groups in brackets."""
    read = "[...document.querySelectorAll('#rows [data-row]')].map(row => row.dataset.row.replace('group ', '@'))"
    return page.evaluate(read)


def shows(page: Page, wanted: list[str]) -> None:
    wait_for(lambda: names(page) == wanted, 30, f"the rows {wanted}, and not {names(page)}")


ALL = ["live", "broken", "@search/sweep", "older"]


def test_all_jobs_are_sorted_filtered_and_folded_and_the_address_keeps_it(url: str, page: Page):
    page.goto(url)
    shows(page, ALL)
    page.get_by_text("6 jobs, $").wait_for()  # all figures are there
    live = page.locator("tr", has=page.get_by_role("link", name="live"))
    assert "slow input on rank 1" in live.inner_text()
    assert "nothing" not in live.inner_text()
    assert HOSTILE in page.locator("tr", has=page.get_by_role("link", name="broken")).inner_text()

    page.get_by_role("button", name="search sweep").click()
    shows(page, ["live", "broken", "@search/sweep", "sweep-0000", "sweep-0001", "sweep-0002", "older"])
    page.get_by_role("button", name="best validation").click()
    by_loss = ["older", "@search/sweep", "sweep-0002", "sweep-0001", "sweep-0000", "live", "broken"]
    shows(page, by_loss)  # what is not known comes last
    assert page.get_by_role("columnheader", name="best validation").get_attribute("aria-sort") == "ascending"
    page.get_by_role("button", name="best validation").click()
    shows(page, ["@search/sweep", "sweep-0000", "sweep-0001", "sweep-0002", "older", "live", "broken"])
    page.get_by_role("button", name="succeeded 4").click()
    page.fill("#search", "SWEEP 0001")
    shows(page, ["@search/sweep", "sweep-0001"])
    page.get_by_label("group", exact=True).uncheck()
    shows(page, ["sweep-0001"])
    address = page.url
    for wanted in (
        ["@search/sweep", "sweep-0001"],
        ["@search/sweep", "sweep-0000", "sweep-0001", "sweep-0002", "older"],
    ):
        page.go_back()
        shows(page, wanted)
    page.goto("about:blank")
    page.goto(address)
    shows(page, ["sweep-0001"])
    assert page.locator("#search").input_value() == "SWEEP 0001"
    page.fill("#search", "no job is called so")
    page.get_by_text("No job matches.").wait_for()


def test_an_address_of_before_leads_to_the_job_and_both_pages_write_dollars_as_all_else_does(url: str, page: Page):
    amounts = [0, 0.00421, 0.5, 0.99996, 1, 1.234, -0.5, 999.994, 1234.4, 1e6]
    written = [dollars(usd) for usd in amounts]
    page.goto(url)
    assert page.evaluate("amounts => amounts.map(money)", amounts) == written
    page.goto("about:blank")
    page.goto(f"{url}#older")
    page.wait_for_url(f"{url}jobs/older")
    assert page.evaluate("amounts => amounts.map(money)", amounts) == written


def test_a_keyboard_does_all_of_it(url: str, page: Page):
    page.goto(url)
    shows(page, ALL)
    focused = "document.activeElement.dataset.row || document.activeElement.id"
    page.keyboard.press("/")
    assert page.evaluate(focused) == "search"
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) == "live"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("End")
    assert page.evaluate(focused) == "older"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")  # unfolds the search
    shows(page, ["live", "broken", "@search/sweep", "sweep-0000", "sweep-0001", "sweep-0002", "older"])
    assert page.evaluate(focused) == "group search/sweep", "the focus stays where it was"
    page.keyboard.press("ArrowDown")
    assert page.url.endswith("#open=search/sweep")
    time.sleep(3)  # polls do not take the focus away
    assert page.evaluate(focused) == "sweep-0000"
    head = page.get_by_role("button", name="cost")
    head.focus()
    page.keyboard.press("Enter")
    assert page.get_by_role("columnheader", name="cost").get_attribute("aria-sort") == "descending"


def test_the_theme_is_kept(url: str, page: Page):
    page.goto(url)
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(theme) == "light"
    page.emulate_media(color_scheme="dark")
    wait_for(lambda: page.evaluate(theme) == "dark", 10, "the page to follow the system")
    page.select_option("#theme", "light")
    assert page.evaluate(theme) == "light"
    for address in (url, f"{url}jobs/older"):
        page.goto(address)
        assert (page.evaluate(theme), page.locator("#theme").input_value()) == ("light", "light"), address


PAGES = {
    "table": ("#open=search/sweep", "#rows tr.within"),
    "job": ("jobs/older", "#headline .figure"),
    "job-failed": ("jobs/broken", "#failure"),
}


@pytest.mark.parametrize(
    "name",
    [name if name in ("table", "job") else pytest.param(name, marks=pytest.mark.long) for name in PAGES],
)
def test_pages_are_accessible_and_fit_every_screen(url: str, page: Page, name: str):
    """Loaded on the smallest and on the largest one, and then made as wide as a laptop, in the theme that it has."""
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
        if name == "table":
            page.get_by_text("6 jobs, $").wait_for()
        fits = "document.documentElement.scrollWidth <= window.innerWidth"
        wait_for(lambda fits=fits: page.evaluate(fits), 10, f"the page to fit into {width} pixels")
        found = Axe().run(page)
        rules = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found.response["violations"]]
        assert rules == [], json.dumps(rules, indent=1)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        shot(page, f"{name}-{width}-{theme}")
