"""`dtrain ui jobs` in a real Chromium, while a real training runs; and the report that it leaves behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from playwright.sync_api import Browser, Page

from dtrain_dagster.cli.main import main
from harness.small_job import PACED_MODEL, write_dataset
from tests.dtrain_dagster.told_events import HOSTILE, START, event, membership, told, write_run

from .chromium import BROWSER_TEST, patient_page, shot
from .conftest import Project, dashboard_of, make_project, wait_for

pytestmark = [*BROWSER_TEST, pytest.mark.timeout(600)]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    made = make_project(tmp_path / "home")
    yield made
    for process in made.processes():
        process.kill()


@pytest.fixture
def url(project: Project) -> Iterator[str]:
    with dashboard_of(project) as address:
        yield address


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A laptop's window. Whatever the page complains of, and whomever it asks, is kept in ``page.complaints``."""
    page = patient_page(browser, viewport={"width": 1280, "height": 800}, color_scheme="light")
    page.complaints = []  # type: ignore[attr-defined]
    page.on("console", lambda message: message.type == "error" and complain(page, message.text))
    page.on("pageerror", lambda error: complain(page, str(error)))
    page.on("dialog", lambda dialog: complain(page, f"a script of an event ran: {dialog.message}"))
    yield page
    page.close()


def complain(page: Page, text: str) -> None:
    page.complaints.append(text)  # type: ignore[attr-defined]


def figure(page: Page, label: str) -> str:
    return page.locator(f'.figure[data-label="{label}"] .value').inner_text()


def points(page: Page, panel: str) -> list[int]:
    """How many points each trace of a panel has. (Playwright's own waiting would need a policy that lets it eval.)"""
    traces = "(document.querySelector(selector)?.data || []).map(trace => trace.x.length)"
    return page.evaluate(f"selector => {traces}", f"#panel-{panel} .chart")


def background(page: Page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_a_training_is_seen_while_it_runs(project: Project, url: str, page: Page, tmp_path: Path):
    asked: set[str] = set()
    page.on("request", lambda request: asked.add(request.url))
    page.goto(url)
    page.get_by_text("There is no training yet").wait_for()

    dataset = write_dataset(tmp_path / "dataset")
    (tmp_path / "paced.py").write_text(PACED_MODEL)
    options = ("--set", "training.log_frequency=2", "--set", "training.monitor_interval_seconds=0.5")
    started = project.cli(
        *("dtrain", "train", "--dataset", str(dataset), "--nodes", "2", "--name", "live", "--epochs", "2000"),
        *("--model", "paced:make", *options, "--detach"),
        PYTHONPATH=str(tmp_path),
        DTRAIN_FACTORY_MODULES="paced",
    )
    assert started.returncode == 0, started.stdout
    page.get_by_role("link", name="live").click()
    before = wait_for(lambda: points(page, "loss"), 90, "the first step"), figure(page, "step")
    wait_for(lambda: points(page, "loss") > before[0], 60, "more steps")
    assert figure(page, "step") != before[1]
    assert figure(page, "state") == "running"
    assert figure(page, "nodes alive") == "2"
    wait_for(lambda: len(points(page, "throughput")) == 3, 60, "both nodes in the panel of throughput")
    assert len(points(page, "breakdown")) == 8
    assert page.locator("#panel-busy h3").inner_text() == "Utilisation of the processors (no GPU here)"
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    shot(page, "dashboard-live")

    told_of = [*told(40), event("error", START + 43, message=HOSTILE, fatal=False)]
    write_run(project.jobs, "told", told_of, state="succeeded")
    page.goto(f"{url}jobs/told")
    page.get_by_text("of 10,000, epoch 1").wait_for()
    page.get_by_text(HOSTILE).wait_for()
    assert figure(page, "state") == "succeeded"

    light = background(page)
    page.emulate_media(color_scheme="dark")
    wait_for(lambda: background(page) != light, 10, "the page to become dark with the system")
    shot(page, "dashboard-dark")

    # Of a job that stays there: a real one may be past it before the page looks.
    write_run(project.jobs, "coming", [event("phase", START, name="startup", seconds=1.0)], state="running")
    page.goto(f"{url}jobs/coming")
    page.get_by_text("waiting for the first step").first.wait_for()
    assert page.complaints == []  # type: ignore[attr-defined]
    assert {address for address in asked if not address.startswith((url, "data:"))} == set()

    shutil.rmtree(project.jobs / "coming")
    page.get_by_text("there is no job of that name; the figures are old").wait_for()


def test_a_lost_node_is_the_first_thing_that_a_page_says(project: Project, url: str, page: Page):
    """A banner above the figures while it lasts, a line once the job is over, and marks on the curve of the loss."""
    lost = [*told(40), membership(2, START + 41, nodes=[0, 1], lost=[2], joined=[])]
    write_run(project.jobs, "lacks", lost)
    page.goto(f"{url}jobs/lacks")
    banner = page.locator("#loss")
    banner.get_by_text("Node 2 was lost").wait_for()
    assert banner.get_attribute("data-open") == "true"
    above = page.evaluate("document.querySelector('#loss').getBoundingClientRect().top")
    assert above < page.evaluate("document.querySelector('#headline').getBoundingClientRect().top")
    assert figure(page, "nodes alive") == "2"
    wait_for(lambda: 1 in points(page, "loss"), 20, "the mark on the curve")
    shot(page, "dashboard-lost-node")

    back = membership(3, START + 45, nodes=[0, 1, 2], lost=[], joined=[2])
    write_run(project.jobs, "survived", [*lost, back], state="succeeded")
    page.goto(f"{url}jobs/survived")
    banner.get_by_text("1 loss survived, 1.25 s without a step").wait_for()
    assert banner.get_attribute("data-open") == "false"
    assert figure(page, "nodes used") == "3"
    assert page.complaints == []  # type: ignore[attr-defined]


def test_a_saved_report_opens_without_any_network(project: Project, page: Page, tmp_path: Path):
    told_of = [*told(40), event("error", START + 43, message=HOSTILE, fatal=False)]
    write_run(project.jobs, "live", told_of, state="succeeded")
    file = tmp_path / "report.html"
    done = CliRunner().invoke(main, ["status", "live", "--html", str(file)], env=project.env)
    assert done.exit_code == 0, done.output
    asked: set[str] = set()
    page.on("request", lambda request: asked.add(request.url))
    page.context.set_offline(True)
    page.goto(file.as_uri())
    page.get_by_text(HOSTILE).wait_for()
    assert figure(page, "step") == "200"
    for key in ("loss", "breakdown", "ranks", "busy", "timeline"):
        assert page.locator(f"#panel-{key} svg.main-svg").first.is_visible(), key
    shot(page, "report")
    assert page.complaints == []  # type: ignore[attr-defined]
    assert {address for address in asked if not address.startswith(("file:", "data:"))} == set()
