"""The dashboard's page of a fleet in a real browser, of records as an orchestrator and nodes leave them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import requests
import uvicorn
from axe_playwright_python.sync_playwright import Axe

from dtrain_dagster.dashboard.fleets import FleetBoard
from dtrain_dagster.dashboard.job_board import JobBoard
from dtrain_dagster.dashboard.server import build_app
from dtrain_dagster.fleet.jobs import FleetJob, FleetLimits, FleetState, JobOrder
from dtrain_dagster.fleet.records import FleetRecords
from trainer.config import DatasetRef, FactoryConfig, JobConfig
from trainer.documents.presences import NodePresence
from trainer.rundir import RunDir, event

from .chromium import BROWSER_TEST, SHOTS, chromium, patient_page

HOSTILE = "<img src=x onerror=alert(1)>"
LIMITS = FleetLimits(budget_usd=20.0, nodes=4, usd_per_node_hour=3.06)
TOLD = [  # name, priority, state, launches as (from minute, to minute, nodes), reason
    ("wide-lr3", 0, FleetState.PAUSED, [(0, 14, 2)], "seeds-final, of higher priority, needs its nodes"),
    ("wide-lr1", 0, FleetState.SUCCEEDED, [(0, 33, 1)], ""),
    ("narrow", 0, FleetState.FAILED, [(0, 6, 1)], f"the loss is not finite at step 120 {HOSTILE}"),
    ("short", 1, FleetState.SUCCEEDED, [(6, 21, 1)], ""),
    ("final", 5, FleetState.RUNNING, [(15, None, 2)], ""),
    ("seed-2", 1, FleetState.RUNNING, [(22, None, 1)], ""),
    ("long", 0, FleetState.ENDED, [], "not begun: it would cost $14.20 to its end, and $11.57 of the budget is left"),
    ("seed-3", 0, FleetState.WAITING, [], ""),
]
WIDE = ("wide-lr3", "seed-3")
"""Jobs that need two nodes."""


def write_fleet(home: Path, now: float) -> None:
    records = FleetRecords(home, "seeds")
    began = now - 2700
    records.write_limits(replace(LIMITS, deadline=now + 5400), began)
    for number, (name, priority, state, spans, reason) in enumerate(TOLD):
        job_id = f"seeds-{name}"
        rundir = RunDir(str(home / "storage" / "jobs" / job_id))
        parts = {"model": FactoryConfig(factory="tcn"), "loss": FactoryConfig(factory="student_t")}
        job = JobConfig(job_id=job_id, run_dir=rundir.uri, dataset=DatasetRef(uri="/data"), **parts)
        kept_job = FleetJob(
            job_id=job_id, priority=priority, least_nodes=2 if name in WIDE else 1, most_nodes=2, node_seconds=3600,
            order=JobOrder(job=job),
        )  # fmt: skip
        entry = records.add(kept_job, number)
        paid, nodes = 0.0, 0
        for launch, (first, last, count) in enumerate(spans, 1):
            ended = None if last is None else began + 60 * last
            for node_id in range(count):
                rundir.write_node(
                    NodePresence(
                        node_id=node_id, launch=launch, started_at=began + 60 * first, ended_at=ended,
                        last_seen_at=ended or now,
                    )
                )  # fmt: skip
            paid = count * ((ended or now) - began - 60 * first)
            nodes = count if last is None else 0
        if spans:
            fields = {"step": 40 + number, "step_seconds": 1.0, "loss": -2.0 + number / 100, "eta_seconds": 600.0}
            told = event("step", 0, 1, **fields)
            rundir.append_events(1, 0, 1, [told])
        settled = 0.0 if nodes else paid  # the bill of nodes that are there is computed when somebody looks
        grant = LIMITS.units_of(paid + 900.0 if nodes else paid)
        records.keep(
            entry,
            replace(
                entry.kept, state=state, nodes=nodes, paid_units=LIMITS.units_of(settled), node_seconds=settled,
                grant_units=grant, reason=reason, launches=len(spans), launched_at=began if spans else None,
            ),
        )  # fmt: skip


@contextmanager
def serving(home: Path) -> Iterator[str]:
    app = build_app(JobBoard(str(home / "storage" / "jobs"), "dedicated"), fleets=FleetBoard(home))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


def test_a_fleet_is_sent_as_json_and_another_name_is_refused(tmp_path: Path):
    write_fleet(tmp_path, time.time())
    with serving(tmp_path) as url:
        assert requests.get(f"{url}/fleets.json", timeout=10).json() == ["seeds"]
        fleet = requests.get(f"{url}/fleets/seeds.json", timeout=10).json()
        assert [job["state"] for job in fleet["jobs"]] == [str(state) for _, _, state, _, _ in TOLD]
        assert fleet["busy_nodes"] == 3
        assert fleet["used_usd"] == pytest.approx(165 / 60 * 3.06, abs=0.1), "of 165 minutes of nodes"
        assert fleet["used_usd"] < fleet["promised_usd"] <= 20
        assert fleet["jobs"][4]["step"] == 44
        assert fleet["jobs"][4]["seconds_left"] > 0
        paused, waiting = fleet["jobs"][0], fleet["jobs"][7]
        assert paused["why"] == "waits for nodes: it needs 2 nodes, and 1 is free"
        assert waiting["why"] == "waits for rank: nodes are kept for seeds-wide-lr3, which comes before it"
        assert paused["begins_in_seconds"] == pytest.approx(600, abs=10), "when those that run have ended"
        assert waiting["begins_in_seconds"] == pytest.approx(600, abs=10)
        assert fleet["ends_in_seconds"] == waiting["ends_in_seconds"]
        assert (waiting["becomes"], fleet["left_out"]) == ("succeeded", 0)
        assert requests.get(f"{url}/fleets/none.json", timeout=10).status_code == 404
        assert requests.get(f"{url}/fleets/..%2Fx.json", timeout=10).status_code == 404


@pytest.mark.parametrize("scheme", ["light"])
class TestPage:
    pytestmark = BROWSER_TEST

    def test_a_fleet_is_drawn_and_its_texts_are_only_text(self, tmp_path: Path, scheme: str):
        write_fleet(tmp_path, time.time())
        with serving(tmp_path) as url, chromium() as browser:
            page = patient_page(browser, viewport={"width": 1400, "height": 1150}, color_scheme=scheme)
            problems: list[str] = []
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("dialog", lambda dialog: problems.append(dialog.message))
            page.goto(f"{url}/")
            page.get_by_role("link", name="fleets").click()
            page.locator("#rows tr").nth(7).wait_for()
            page.locator("#nodes .scatterlayer .trace").nth(5).wait_for()
            page.locator("#dollars .scatterlayer .trace").first.wait_for()
            assert page.locator("#rows").inner_text().count(HOSTILE) == 1
            assert page.locator("#rows img").count() == 0
            assert "3 of 4" in page.locator("#headline").inner_text()
            for theme in ("light", "dark"):
                page.select_option("#theme", theme)
                found = Axe().run(page).response["violations"]
                assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == [], theme
            page.set_viewport_size({"width": 360, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
            if SHOTS:
                page.wait_for_timeout(1000)
                page.screenshot(path=Path(SHOTS) / "fleet.png")
            assert not problems
