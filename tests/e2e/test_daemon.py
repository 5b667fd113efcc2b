"""Every sensor under a real `dagster-daemon`, over SQLite and Postgres, whose machine is lost again and again.

The clock stands still for nobody: each daemon lives in a later time than the one before (`tests/e2e/clock`). Runs that
are asked for stay in the queue, since what they do is shown elsewhere.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._core.definitions.run_request import InstigatorType

from dtrain_dagster.automation.capacity_queue import TICKET_TAG, WaitingList, new_ticket
from dtrain_dagster.automation.retraining import CAUSE_TAG
from dtrain_dagster.clusters.base import GPUClusterManager, JobSpec
from dtrain_dagster.costs.estimate import Estimate, Interval, Work
from dtrain_dagster.costs.plan import PLAN, TrainingPlan
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings.environment import Settings
from tests.trained import record_training, sha256
from tests.webhook import web_hook
from trainer.rundir import RunDir

from . import postgres
from .conftest import BIN, ROOT, Project, make_project, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HOUR = 3600.0
SENSORS = {"cost_overrun", "ceilings", "idle_cluster", "queue", "orphans", "new_data", "staleness", "retraining_failed"}
JOB = "train-00000000-11111111"


class World:
    """A project whose daemon can be lost; what its instance holds, and who was told what."""

    def __init__(self, project: Project, instance: dg.DagsterInstance, heard: list[dict[str, Any]]) -> None:
        self.project, self.instance, self.heard = project, instance, heard

    def ticked(self) -> dict[str, float]:
        """Of each sensor, when its latest tick that has ended began."""
        return {
            state.instigator_name: getattr(state.instigator_data, "last_tick_timestamp", None) or 0.0
            for state in self.instance.all_instigator_state(instigator_type=InstigatorType.SENSOR)
        }

    def failed(self, asset: str, check: str) -> int:
        """How often the check has failed."""
        key = dg.AssetCheckKey(dg.AssetKey(asset), check)
        history = self.instance.event_log_storage.get_asset_check_execution_history(key, limit=1000)
        evaluations = [item.event.asset_check_evaluation for item in history if item.event]
        return sum(1 for item in evaluations if item and not item.passed)

    def runs(self, tag: str) -> list[dg.DagsterRun]:
        return [run for run in self.instance.get_runs() if tag in run.tags]

    def done(self) -> Counter[str]:
        """All that sensors have done, by what it was for. Nobody may have been told anything twice."""
        titles = Counter(message["title"] for message in self.heard)
        assert set(titles.values()) <= {1}, titles
        return Counter(
            {
                "overrun": self.failed("trained_checkpoint", "cost_within_estimate"),
                "idle": self.failed("gpu_cluster", "not_idle"),
                **Counter(f"run for {run.tags[CAUSE_TAG].partition('-')[0]}" for run in self.runs(CAUSE_TAG)),
                **Counter("run for capacity" for run in self.runs(TICKET_TAG)),
            }
        )

    @contextmanager
    def daemon(self, moved: float) -> Iterator[None]:
        """A daemon whose clock goes ``moved`` seconds before ours, until each sensor has ticked; then it is killed,
        and everything that it has started with it."""
        begun = time.time() + moved
        path = os.pathsep.join([str(Path(__file__).parent / "clock"), self.project.env.get("PYTHONPATH", "")])
        with open(self.project.home / "daemon.log", "ab") as log:
            process = subprocess.Popen(
                [str(BIN / "dagster-daemon"), "run", "-w", "workspace.yaml"],
                cwd=ROOT,
                env={**self.project.env, "PYTHONPATH": path, "MOVED_SECONDS": str(moved)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_for(
                lambda: {name for name, at in self.ticked().items() if at >= begun} >= SENSORS,
                90,
                "a tick of every sensor",
            )
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.long)])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    storage: dict[str, Any] = {}
    with ExitStack() as stack:
        if request.param == "postgres":
            if why := postgres.missing():
                pytest.skip(why)
            storage = {"storage": stack.enter_context(postgres.postgres())}
        url, heard = stack.enter_context(web_hook())
        prices = tmp_path / "prices.csv"
        prices.write_text("date,A\n2020-01-02,1\n")
        project = make_project(
            tmp_path / "home",
            DTRAIN_PRICES=str(prices),
            DTRAIN_NOTIFY=url,
            DTRAIN_RETRAIN_BUDGET_USD="2.5",
            DTRAIN_OPTIONS="idle_minutes=2",  # a sensor need not count more time than it can have watched
        )
        config = Path(project.env["DAGSTER_HOME"]) / "dagster.yaml"
        settings = yaml.safe_load(config.read_text()) | storage
        settings["concurrency"]["runs"]["max_concurrent_runs"] = 0
        config.write_text(yaml.safe_dump(settings))
        instance = stack.enter_context(dg.DagsterInstance.from_config(str(config.parent)))
        switched_on = project.cli("dagster", "sensor", "start", "--start-all", "-w", "workspace.yaml")
        assert switched_on.returncode == 0, switched_on.stdout
        yield World(project, instance, heard)
        for process in project.processes():
            process.kill()


def start_job(manager: GPUClusterManager, jobs_uri: str) -> None:
    """A job that costs more than its plan says, from its first second."""
    manager.provision_cluster(2, "Standard_NC6s_v3")
    run_dir, nothing = f"{jobs_uri}/{JOB}", Interval(low=1e-9, expected=1e-9, high=1e-9)
    plan = TrainingPlan(
        fingerprint="00000000",
        job={},
        sku="Standard_NC6s_v3",
        tier="dedicated",
        node_count=2,
        processes_per_node=1,
        work=Work(steps=10, evaluations=1, checkpoints=1),
        estimate=Estimate(seconds=nothing, usd=nothing, usd_per_node_hour=3.0, node_count=2),
        basis="a test",
        price_note="",
    )
    RunDir(run_dir).write_json(PLAN, asdict(plan))
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    manager.submit_job(JobSpec(job_id=JOB, run_dir=run_dir, command=command, node_count=2))


@pytest.mark.long
def test_each_cause_fires_once_however_often_the_daemon_dies(world: World):
    settings = Settings(home=world.project.home, nodes=2)
    manager = build_resources(settings)["cluster"].manager()
    prices = Path(world.project.env["DTRAIN_PRICES"])
    from dagster._core.test_utils import freeze_time  # which loads a server

    with freeze_time(datetime.now(UTC) - timedelta(days=31)):
        record_training(world.instance, settings.shared_uri, sha256(prices), "2020-01-02")
    prices.write_text("date,A\n2020-01-02,1\n2020-01-03,2\n")
    ticket = new_ticket("no-capacity", ["stock_prices"], {}, "none to be had", time.time() - 3600, 24 * HOUR)
    WaitingList(settings.shared_uri).put(ticket)
    start_job(manager, settings.jobs_uri)

    with world.daemon(moved=0):  # the champion is old; the file may still be written to
        done = Counter({"overrun": 1, "run for capacity": 1, "run for age": 1})
        assert world.done() == done
    [run] = world.runs(CAUSE_TAG)
    assert run.run_config == {"ops": {"cost_estimate": {"config": {"budget_usd": 2.5}}}}

    world.instance.report_run_failed(run, "no space left")  # before it trained: its next try is hours away
    for other in world.runs(TICKET_TAG):
        world.instance.report_run_canceled(other)
    with world.daemon(moved=HOUR):  # the file has been quiet; the job still costs more than its plan says
        done += Counter({"run for data": 1})
        assert world.done() == done
    assert {"dtrain: a run no longer waits for capacity", "dtrain: a retraining has failed"} <= {
        message["title"] for message in world.heard
    }

    manager.cancel_job(JOB)
    assert manager.monitor_health().nodes
    with world.daemon(moved=2 * HOUR):
        done += Counter({"idle": 1})
        assert world.done() == done
    assert not manager.monitor_health().nodes
    with world.daemon(moved=3 * HOUR):
        assert world.done() == done
