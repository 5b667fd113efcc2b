"""The product's main job as `make run` does it, but for fewer epochs, once for all tests of a finished graph.

Bundled prices, and three nodes, of which one is killed while it trains. `dtrain ui` runs beside it with its daemon.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import dagster as dg
import psutil
import pytest
from playwright.sync_api import Page as BrowserPage

from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.costs.tracker import CostTracker
from tests.abuse.foreign_page import EVIL_IS_HERE, attack_from, connects_as, foreign_site
from tests.abuse.planted_secrets import CARRIERS, secret_of
from tests.abuse.websites import source_of
from tests.leaks import leaks
from tests.page import Page
from trainer.rundir import RunDir

from .chromium import chromium, in_a_browser, patient_page, shot
from .conftest import BIN, ENDED, ROOT, Dagster, Project, make_project, start_dagster, stop_dagster, wait_for
from .figures import disagreements, figures_of
from .killing import Killer, job_folder, node_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KILLED = 1
STEP_OF_KILL = 60
FEWER_EPOCHS = {"ops": {"cost_estimate": {"config": {"epochs": 3}}}}
"""Half of what `make run` trains: enough for the gate, and for a lost node to be replaced long before the end."""


@dataclass
class WholeGraph:
    """A run of all assets, by `dagster asset materialize`."""

    project: Project
    dagster: Dagster
    command: subprocess.Popen[bytes]
    killer: Killer

    def run_id(self) -> str:
        text = "{ runsOrError { ... on Runs { results { runId } } } }"
        found = lambda: self.dagster.query(text)["runsOrError"]["results"]  # noqa: E731
        return str(wait_for(found, 60, "the run to be in the overview")[-1]["runId"])

    def runs(self) -> list[str]:
        with dg.DagsterInstance.from_config(self.project.env["DAGSTER_HOME"]) as instance:
            return [run.run_id for run in instance.get_runs()]

    def printed(self) -> str:
        return (self.project.home / "materialize.log").read_text()

    def finish(self) -> None:
        """Wait for its end."""
        assert self.command.wait(600) == 0, self.printed()[-6000:]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeGraph]:
    project = make_project(tmp_path_factory.mktemp("whole") / "home", DTRAIN_NODES="3")
    command = [str(BIN / "dagster"), "asset", "materialize", "-m", "dtrain_dagster.definitions"]
    command += ["--select", "not group:studies", "--config-json", json.dumps(FEWER_EPOCHS)]
    server = start_dagster(project)
    with (project.home / "materialize.log").open("wb") as log:
        started = subprocess.Popen(command, cwd=ROOT, env=project.env, stdout=log, stderr=log)
    try:
        yield WholeGraph(project, server, started, Killer(project.home, KILLED, STEP_OF_KILL))
    finally:
        started.kill()
        started.wait()
        stop_dagster(server)
        for process in project.processes():
            process.kill()


@pytest.fixture
def finished(graph: WholeGraph) -> WholeGraph:
    graph.finish()
    return graph


@pytest.fixture(scope="module")
def page(graph: WholeGraph) -> Iterator[BrowserPage]:
    with chromium() as browser:
        yield patient_page(browser, viewport={"width": 1600, "height": 1000})


def test_sensors_and_schedule_are_there_and_stand_as_meant(graph: WholeGraph) -> None:
    text = (
        "query($s: RepositorySelector!) { repositoryOrError(repositorySelector: $s) { ... on Repository { "
        "sensors { name sensorState { status } } schedules { name cronSchedule scheduleState { status } } } } }"
    )
    selector = {"repositoryLocationName": "dtrain", "repositoryName": "__repository__"}
    repository = graph.dagster.query(text, s=selector)["repositoryOrError"]
    sensors = {sensor["name"]: sensor["sensorState"]["status"] for sensor in repository["sensors"]}
    on = {"idle_cluster", "cost_overrun", "ceilings", "queue", "orphans", "retraining_failed"}
    assert sensors == {**dict.fromkeys(on, "RUNNING"), "new_data": "STOPPED", "staleness": "STOPPED"}
    schedules = {schedule["name"]: schedule["scheduleState"]["status"] for schedule in repository["schedules"]}
    assert schedules == {"weekly_retraining": "STOPPED"}


@in_a_browser
def test_a_foreign_page_beside_dtrain_ui_launches_nothing(graph: WholeGraph) -> None:
    """The real thing, with its code location and its daemon. Before `page`, since a process has one Chromium."""
    url, started = graph.dagster.url, graph.run_id()
    with chromium(host_rules=EVIL_IS_HERE) as browser:
        with foreign_site(url) as site:
            told = attack_from(browser, url, site)
        assert ["websocket", "open"] not in told
        assert [what for name, what in told if name == "rebound"] == ["403", "403"]
        assert graph.runs() == [started]
        page = patient_page(browser)
        page.goto(f"{url}/locations/dtrain/jobs/train")
        page.locator('button:has-text("Materialize all")').first.wait_for()


@in_a_browser
def test_it_is_watched_while_it_trains(graph: WholeGraph, page: BrowserPage) -> None:
    wait_for(lambda: graph.dagster.observations("trained_checkpoint"), 150, "live progress", pause=3.0)
    page.goto(f"{graph.dagster.url}/runs/{graph.run_id()}")
    page.get_by_text("trained_checkpoint").first.wait_for()
    shot(page, "run")
    page.goto("about:blank")  # it is drawn anew with each event, which takes as much of a core as a rank


def test_it_makes_a_champion(finished: WholeGraph) -> None:
    summary = finished.project.cli("dtrain", "status")
    assert summary.returncode == 0
    assert "alias champion" in summary.stdout
    job = job_folder(finished.project.home)
    result = json.loads((job / "result.json").read_text())
    assert result["world_size"] == 3
    assert result["weights_equal_on_ranks"]
    assert len(list((job / "checkpoints").glob("g*"))) >= 3
    evaluation = json.loads((job / "evaluation.json").read_text())
    assert evaluation["model"]["nll"] < evaluation["baselines"]["har_x"]["nll"]
    assert 0.87 < evaluation["model"]["coverage_90"] < 0.93


def test_the_killed_node_is_replaced_and_every_second_of_every_stay_is_paid_for(finished: WholeGraph) -> None:
    """R2.4, R4.2, D2: the survivors go on, with each sample used once and no step done twice."""
    home = finished.project.home
    assert finished.killer.killed == 1
    with dg.DagsterInstance.from_config(finished.project.env["DAGSTER_HOME"]) as instance:
        told = metadata(instance, "trained_checkpoint")
        logged = instance.all_logs(finished.run_id(), of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    checks = {
        entry.dagster_event.event_specific_data.check_name: entry.dagster_event.event_specific_data.passed
        for entry in logged
    }
    assert checks["every_sample_used_once"]
    assert checks["weights_equal_on_all_ranks"]
    assert told["generations"] >= 2
    assert "is gone" in told["membership"] or "failed after" in told["membership"]
    rundir = RunDir(str(job_folder(home)))
    stays = {(node.node_id, node.incarnation): node for node in rundir.nodes()}
    assert stays[KILLED, 1].exit_codes == (-signal.SIGKILL,)
    assert all(node.ended_at for node in rundir.nodes())
    steps = [event["step"] for event in rundir.events("step")]
    assert len(steps) == len(set(steps)), "no step that counts was done twice"
    assert not list(rundir.events("resume")), "nobody had to go back to a checkpoint"
    assert not node_processes(home, None)
    usage = LocalClusterManager(home).node_usage(job_folder(home).name)
    bill = ledger(CostTracker("local", usage, "dedicated").nodes, rundir.events())
    unknown = bill.causes().get(CostCause.UNEXPLAINED)
    assert unknown is None or unknown.microseconds < 0.01 * bill.microseconds, "all that is paid for has a cause"


def test_all_places_show_the_same_figures(finished: WholeGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in finished.project.env.items():
        monkeypatch.setenv(name, value)
    assets = ("cost_estimate", "trained_checkpoint", "registered_model", "cost_breakdown", "performance_report")
    with dg.DagsterInstance.get() as instance:
        found = figures_of(job_folder(finished.project.home), {name: metadata(instance, name) for name in assets})
    assert all(len(places) > 1 for places in found.values())
    assert disagreements(found) == []


@in_a_browser
def test_its_pages_show_curves_and_lineage_and_materialize_at_the_press_of_a_button(
    finished: WholeGraph, page: BrowserPage
) -> None:
    url = finished.dagster.url
    page.goto(f"{url}/assets/trained_checkpoint")
    page.get_by_text("facts", exact=True).first.wait_for()
    page.locator("code", has_text="▁").first.wait_for()
    shot(page, "checkpoint")
    page.goto(f"{url}/assets/registered_model?view=lineage&lineageScope=upstream&lineageDepth=5")
    for asset in ("stock_prices", "sharded_dataset", "cost_estimate", "trained_checkpoint", "registered_model"):
        page.get_by_text(asset, exact=True).first.wait_for()
    shot(page, "lineage")

    [before] = finished.dagster.materializations("stock_prices")
    page.goto(f"{url}/assets/stock_prices")
    page.locator('button:has-text("Materialize")').first.click()
    made = lambda: len(finished.dagster.materializations("stock_prices")) == 2  # noqa: E731
    wait_for(made, 60, "the run that the button starts")
    again = finished.dagster.materializations("stock_prices")[0]
    assert again["runId"] != before["runId"]
    wait_for(lambda: finished.dagster.status(again["runId"]) in ENDED, 30, "the run to end")
    assert finished.dagster.status(again["runId"]) == "SUCCESS"


def test_nothing_else_of_the_ui_listens_where_others_reach_it(finished: WholeGraph) -> None:
    url, process = finished.dagster.url, psutil.Process(finished.dagster.processes[0].pid)
    tree = [process, *process.children(recursive=True)]

    def connections(kind: str) -> Iterator[Any]:
        for one in tree:
            with suppress(psutil.NoSuchProcess):  # a child that has just ended
                yield from one.net_connections(kind)

    listening = [at for at in connections("inet") if at.status == psutil.CONN_LISTEN]
    assert [f"http://{at.laddr.ip}:{at.laddr.port}" for at in listening] == [url]
    sockets = [Path(at.laddr) for at in connections("unix") if str(at.laddr).startswith("/")]
    assert sockets
    for path in sockets:
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH), "others may call a code server"
        if os.geteuid() == 0:
            assert connects_as(os.getuid(), path)
            assert not connects_as(65534, path)


def test_dtrain_ui_stores_no_secret_of_a_launchpad_and_launches_with_a_reference(finished: WholeGraph) -> None:
    server, project, secret = finished.dagster, finished.project, secret_of(Random(8))
    for carrier in ("sas", "password"):
        source = CARRIERS[carrier].format(secret)
        for config in (source_of(source), json.dumps(source_of(source))):
            with pytest.raises(AssertionError, match=r"ops\.stock_prices\.config\.source carries"):
                server.launch("stock_prices", config=config)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"resources\.project\.config\.notify.*env:NAME"):
        server.launch(
            "stock_prices", config={"resources": {"project": {"config": {"notify": f"slack://a/b/{secret}"}}}}
        )
    assert not leaks([project.home / "dagster", project.home / "ui.log"], [secret])
    run_id = server.launch("stock_prices", config=source_of("env:NOT_SET"))
    try:
        with dg.DagsterInstance.from_config(project.env["DAGSTER_HOME"]) as instance:
            assert instance.get_run_by_id(run_id).run_config == source_of("env:NOT_SET")  # type: ignore[union-attr]
            wait_for(lambda: server.status(run_id) in ENDED, 120, "a run whose reference leads nowhere")
    finally:
        with dg.DagsterInstance.from_config(project.env["DAGSTER_HOME"]) as instance:
            instance.delete_run(run_id)


def metadata(instance: dg.DagsterInstance, asset: str) -> Page:
    event = instance.get_latest_materialization_event(dg.AssetKey(asset))
    assert event is not None
    assert event.asset_materialization is not None
    return Page(event.asset_materialization.metadata)
