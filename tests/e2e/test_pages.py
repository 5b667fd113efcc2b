"""The pages of `dtrain ui jobs` and `dtrain ui mlflow` in a real Chromium: the list of jobs, a job while it trains, one
that failed, its logs, the saved report, and the list of runs. By mouse, keyboard and address."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import requests
from axe_playwright_python.sync_playwright import Axe
from click.testing import CliRunner
from playwright.sync_api import Browser, Page

from dtrain_dagster.cli.main import main
from dtrain_dagster.web.third_party_uis import runs_page
from harness.small_job import write_dataset
from harness.tables import copy_tables
from tests.abuse.dashboard_load import write_jobs
from tests.dtrain_dagster.told_events import HOSTILE, START, event, membership, told, write_run
from trainer.observability.mlflow_sink import KIND_TAG, prepare_list
from trainer.rundir import RunDir

from .chromium import in_a_browser, patient_page, shot
from .conftest import BIN, ROOT, Project, dashboard_of, make_project, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MESSAGE = f"rank 1 on node 1 failed first (exit code 1); the end of its log:\n{HOSTILE}\nValueError: the batch is empty"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A home with 120 trainings that have ended, and a hostile one that failed."""
    made = make_project(tmp_path_factory.mktemp("home"))
    write_jobs(made.jobs, 120, time.time())
    rundir = write_run(made.jobs, "broken", told(20), state="failed")
    times = {"started_at": time.time() - 60, "ended_at": time.time()}
    rundir.write_json("status.json", {"state": "failed", "message": MESSAGE, "exit_code": 1, "launch": 1, **times})
    yield made
    for process in made.processes():
        process.kill()


@pytest.fixture(scope="module")
def url(project: Project) -> Iterator[str]:
    with dashboard_of(project) as address:
        yield address


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A laptop's window, in which nothing may go wrong and no script of an event may run, and which asks no other
    server."""
    page = patient_page(browser, viewport={"width": 1280, "height": 800}, color_scheme="light")
    complaints, asked = list[str](), set[str]()
    page.on("request", lambda request: asked.add(request.url))
    page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(f"a script of an event ran: {dialog.message}"))
    yield page
    page.close()
    gone = ("404", "no job of that name")  # a job that was removed
    assert [text for text in complaints if not any(code in text for code in gone)] == []
    assert [each for each in asked if not each.startswith(("http://127.0.0.1:", "data:", "file:", "about:"))] == []


def figure(page: Page, label: str) -> str:
    return page.locator(f'.figure[data-label="{label}"] .value').inner_text()


def points(page: Page, panel: str) -> list[int]:
    """How many points each trace of a panel has. (Playwright's own waiting would need a policy that lets it eval.)"""
    traces = "(document.querySelector(selector)?.data || []).map(trace => trace.x.length)"
    return page.evaluate(f"selector => {traces}", f"#panel-{panel} .chart")


def is_above(page: Page, upper: str, lower: str) -> bool:
    top = "selector => document.querySelector(selector).getBoundingClientRect().top"
    return page.evaluate(top, upper) < page.evaluate(top, lower)


def fits(page: Page, *widths: int) -> None:
    for width in widths:
        page.set_viewport_size({"width": width, "height": 900})
        wait_for(lambda: page.evaluate("document.documentElement.scrollWidth <= innerWidth"), 20, f"to fit {width} px")


@in_a_browser
def test_a_training_is_seen_while_it_runs_and_a_lost_node_first_of_all(project: Project, url: str, page: Page) -> None:
    """A banner above the figures while a node is lost, a line once the job is over, and a mark on the loss."""
    rundir = write_run(project.jobs, "live", [event("phase", START, name="startup", seconds=1.0)])
    page.goto(f"{url}jobs/live")
    page.get_by_text("waiting for the first step").first.wait_for()
    rundir.append_events(1, 0, 2, [*told(20), event("error", START + 20, message=HOSTILE, fatal=False)])
    page.get_by_text(HOSTILE).wait_for()
    before = wait_for(lambda: points(page, "loss"), 60, "the first step"), figure(page, "step")
    rundir.append_events(1, 0, 3, told(20, first=20))
    wait_for(lambda: points(page, "loss") > before[0], 60, "more steps")
    assert figure(page, "step") != before[1]
    assert figure(page, "state") == "running"
    for node in rundir.nodes():
        rundir.write_node(replace(node, last_seen_at=time.time() + 60))
    wait_for(lambda: figure(page, "nodes alive") == "3", 20, "the signs of life of the nodes")
    assert len(points(page, "throughput")) == 4
    assert len(points(page, "breakdown")) == 8
    assert page.locator("#panel-busy h3").inner_text() == "Utilisation of the processors (no GPU here)"
    shot(page, "dashboard-live")

    banner = page.locator("#loss")
    goes_on = [{**one, "generation": 2} for one in told(5, first=41)]
    rundir.append_events(2, 0, 1, [membership(2, START + 41, nodes=[0, 1], lost=[2], joined=[]), *goes_on])
    banner.get_by_text("Node 2 was lost").wait_for()
    assert banner.get_attribute("data-open") == "true"
    assert is_above(page, "#loss", "#headline")
    wait_for(lambda: 1 in points(page, "loss"), 20, "the mark on the curve")
    shot(page, "dashboard-lost-node")
    rundir.append_events(3, 0, 1, [membership(3, START + 45, nodes=[0, 1, 2], lost=[], joined=[2])])
    rundir.write_json("status.json", (rundir.read_json("status.json") or {}) | ended("succeeded"))
    banner.get_by_text("1 loss survived, 1.25 s without a step").wait_for()
    assert banner.get_attribute("data-open") == "false"
    assert figure(page, "nodes used") == "3"

    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    wait_for(lambda: page.evaluate(background) != light, 10, "the page to become dark with the system")
    shot(page, "dashboard-dark")
    write_run(project.jobs, "coming", told(1))
    page.goto(f"{url}jobs/coming")
    page.locator("#headline .figure").first.wait_for()
    shutil.rmtree(project.jobs / "coming")
    page.get_by_text("there is no job of that name; the figures are old").wait_for()


def ended(state: str) -> dict[str, object]:
    return {"state": state, "launch": 1, "started_at": time.time() - 60, "ended_at": time.time()}


@in_a_browser
def test_a_saved_report_opens_without_any_network(project: Project, page: Page, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    done = CliRunner().invoke(main, ["status", "broken", "--html", str(file)], env=project.env)
    assert done.exit_code == 0, done.output
    page.context.set_offline(True)
    page.goto(file.as_uri())
    page.locator("#headline .figure").first.wait_for()
    assert figure(page, "step") == "100"
    for key in ("loss", "breakdown", "ranks", "busy", "timeline"):
        assert page.locator(f"#panel-{key} svg.main-svg").first.is_visible(), key
    shot(page, "report")


@in_a_browser
def test_a_failed_job_says_why_first_and_its_address_keeps_what_is_looked_at(
    project: Project, url: str, page: Page
) -> None:
    storage = RunDir(str(project.jobs / "broken")).storage
    lines = [f"2026-01-01 10:00:{at % 60:02d} step {at}" for at in range(300)]
    storage.write("logs/node-0.log", "\n".join([*lines, "password=PLANTEDPLANTED", ""]).encode())
    storage.write("logs/node-1.log", f"{HOSTILE}\nValueError: the batch is empty\n".encode())
    page.goto(f"{url}jobs/broken")
    failure = page.locator("#failure")
    failure.get_by_text("failed: exit code 1").wait_for()
    assert failure.locator(".cause").inner_text() == "ValueError: the batch is empty"
    assert HOSTILE in failure.locator("pre").inner_text()
    assert is_above(page, "#failure", "#headline")
    shot(page, "job-failed")

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
    with open(storage.local_path("logs/node-1.log"), "a") as file:
        file.writelines(f"flood {number}\n" for number in range(1500))
    page.get_by_text("the last 1,000 lines; dtrain logs has all", exact=True).wait_for()
    page.locator("#log-lines").get_by_text("flood 1499").wait_for()
    fits(page, 360, 1280)

    page.locator("#tab-logs").focus()
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.id") == "tab-charts"
    page.keyboard.press("ArrowRight")
    page.get_by_text("There is no verdict on the model").wait_for()
    page.keyboard.press("ArrowRight")
    page.locator("#part-settings").get_by_text('"factory": "tcn"').wait_for()
    fits(page, 360, 1280)


@in_a_browser
def test_any_job_is_found_and_the_list_follows_what_happens(project: Project, url: str, page: Page) -> None:
    def count(wanted: int) -> None:
        wait_for(lambda: page.locator("#rows tr").count() == wanted, 30, f"{wanted} rows")

    shutil.rmtree(project.jobs / "live", ignore_errors=True)
    live = write_run(project.jobs, "training", told(60))
    page.goto(url)
    page.get_by_text("122 jobs, $").wait_for()
    count(100)
    assert page.locator("#rows tr").first.get_attribute("data-state") == "running"
    assert "ValueError: the batch is empty" in page.locator("tr#job-broken, tr", has_text="broken").first.inner_text()
    page.get_by_role("link", name="show more").click()
    count(122)

    page.get_by_label("state").select_option("failed")
    page.get_by_role("button", name="Show").click()
    count(7)
    assert set(page.locator("#rows td.state").all_inner_texts()) == {"failed"}
    page.get_by_role("searchbox").fill("no job is called so")
    page.keyboard.press("Enter")
    page.get_by_text("No job matches.").wait_for()
    page.get_by_role("searchbox").fill("-00000064")  # number 100
    page.keyboard.press("Enter")
    count(1)
    page.reload()
    count(1)

    page.goto(f"{url}find/training")
    page.get_by_role("link", name="training").focus()
    live.write_json("status.json", {**ended("cancelled"), "message": HOSTILE})
    page.locator('#rows tr[data-state="cancelled"]').wait_for()
    assert page.evaluate("document.activeElement.id") == "job-training", "the focus stays where it was"
    page.keyboard.press("Enter")
    page.wait_for_url(f"{url}jobs/training")


@in_a_browser
@pytest.mark.parametrize(
    ("address", "there"),
    [
        pytest.param("", "#rows tr", marks=pytest.mark.long),
        ("jobs/train-00000001-00000001", "#headline .figure"),
        pytest.param("jobs/broken", "#failure", marks=pytest.mark.long),
    ],
)
def test_pages_are_accessible_and_fit_every_screen(url: str, page: Page, address: str, there: str) -> None:
    for width, theme in ((360, "dark"), (3840, "light")):
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": width, "height": 900})
        page.goto("about:blank")
        page.goto(f"{url}{address}")
        page.locator(there).first.wait_for()
        fits(page, width)
        found = Axe().run(page)
        rules = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found.response["violations"]]
        assert rules == [], json.dumps(rules, indent=1)
        shot(page, f"page-{width}-{theme}")


@pytest.mark.long
@in_a_browser
def test_a_training_is_cancelled_and_resumed_from_its_page(
    project: Project, url: str, page: Page, tmp_path: Path
) -> None:
    dataset = write_dataset(tmp_path / "dataset")
    started = project.cli(
        *("dtrain", "train", "--dataset", str(dataset), "--nodes", "1", "--name", "real", "--epochs", "4000"),
        *("--set", "training.log_frequency=2", "--detach"),
    )
    assert started.returncode == 0, started.stdout
    page.goto(f"{url}jobs/real")
    wait_for(lambda: figure(page, "state") == "running", 120, "the job to train")
    page.locator("#order-cancel:enabled").click()
    page.keyboard.press("Escape")
    assert figure(page, "state") == "running", "who leaves the question cancels nothing"
    page.locator("#order-cancel").click()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_text("job real: cancelled").wait_for()
    wait_for(lambda: figure(page, "state") == "cancelled", 60, "the page to say so")
    page.locator("#order-resume:enabled").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume the job").click()
    page.get_by_text("Resume the job: done").wait_for()
    wait_for(lambda: figure(page, "state") == "running", 120, "the job to train again")
    page.get_by_text("over 2 launches").first.wait_for()
    audit = "".join(path.read_text() for path in Path(project.env["DTRAIN_HOME"], "audit").iterdir())
    assert [json.loads(line)["operation"] for line in audit.splitlines()][:2] == [
        f"{order} from the dashboard" for order in ("cancel", "resume")
    ]


@in_a_browser
def test_mlflows_list_opens_with_the_columns_by_which_trainings_are_compared_behind_the_guard(
    browser: Browser, tmp_path: Path
) -> None:
    """Its link opens the list of the experiment, and nothing warns. MLflow itself takes requests from any page of this
    machine."""
    uri, said = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "said.txt"
    experiment = experiment_with_a_run(uri, tmp_path)
    with said.open("w") as errors:
        process = subprocess.Popen(
            [str(BIN / "dtrain"), "ui", "mlflow", "--port", "0"],
            cwd=ROOT, env=os.environ | {"DTRAIN_HOME": str(tmp_path)}, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        label, _, url = process.stdout.readline().strip().partition(": ")
        host, _, shown = url.partition("/#")
        assert (label, shown) == ("MLflow", f"/experiments/{experiment}/runs?viewStateShareKey=dtrain")
        page = patient_page(browser, viewport={"width": 1900, "height": 900})
        page.goto(url)
        for name in ("model", "valid/loss", "test/loss", "cost/total_usd", "gate", "nodes"):
            page.locator('[role="columnheader"]', has_text=name).first.wait_for()
        page.get_by_text("har_tcn").first.wait_for()
        assert page.locator('[role="columnheader"]', has_text="har_nll").count() == 0
        shot(page, "mlflow-runs")
        page.close()
        assert requests.get(host, headers={"Host": "evil.example"}, timeout=60).status_code == 403
        create = f"{host}/ajax-api/2.0/mlflow/experiments/create"
        for origin, status in (("http://localhost:8000", 403), ("http://evil.example", 403), (host, 200)):
            answer = requests.post(create, json={"name": "planted"}, headers={"Origin": origin}, timeout=60)
            assert answer.status_code == status, origin
        assert "Deprecat" not in said.read_text()
    finally:
        process.terminate()
        assert process.wait(30) is not None
    assert runs_page(uri, "there is none of that name") == "", "MLflow's first page opens"


def experiment_with_a_run(uri: str, home: Path) -> str:
    """Make a run as an older version wrote it, in an experiment without a view; return the experiment's id."""
    from mlflow.tracking import MlflowClient

    copy_tables(home / "mlflow.db")
    client = MlflowClient(uri)
    experiment = client.create_experiment(
        "dtrain", str(home / "mlartifacts"), tags={KIND_TAG: "custom_model_development"}
    )
    run = client.create_run(experiment, run_name="one", tags={"gate": "passed", "nodes": "3"}).info.run_id
    client.log_param(run, "model", "har_tcn")
    for name in ("valid/loss", "test/loss", "cost/total_usd", "baseline/har_nll"):
        client.log_metric(run, name, 0.5)
    client.set_terminated(run)
    return experiment


def test_the_kind_that_a_person_has_chosen_stays_and_what_is_there_is_not_written_again() -> None:
    written: dict[str, str] = {}

    class Client:
        def set_experiment_tag(self, experiment_id: str, name: str, value: str) -> None:
            written[name] = value

    prepare_list(Client(), "1", {KIND_TAG: "genai_development"})  # type: ignore[arg-type]
    assert list(written) == ["mlflow.sharedViewState.dtrain"]
    prepare_list(Client(), "1", dict(written, **{KIND_TAG: "mine"}))  # type: ignore[arg-type]
    assert len(written) == 1
