"""The engine on a real SLURM with accounting (slurmdbd on MariaDB): limits of accounts, and what is known of a job that
slurmctld has forgotten."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dtrain_dagster.cli.main import main
from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.managers import EngineClusterManager
from dtrain_dagster.clusters.slurm import commands
from dtrain_dagster.clusters.slurm.engine import SlurmEngine, SlurmError
from dtrain_dagster.clusters.supervision.engine import EngineUnreachableError, name_job
from dtrain_dagster.clusters.supervision.submit import LaunchSettings
from dtrain_dagster.settings.slurm import SlurmSettings
from harness.engines.engine_training import Training, write_job
from harness.engines.slurm_cluster import SlurmCluster, missing
from tests.dtrain_dagster.told_json import printed

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def accounted() -> Iterator[SlurmCluster]:
    """A SLURM with one machine, and accounting."""
    if why := missing(accounting=True):
        pytest.skip(why)
    with SlurmCluster(nodes=1, accounting=True) as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment().items():
            patch.setenv(name, value)
        yield cluster


@pytest.fixture
def launch() -> dict[str, Any]:
    return {"token": os.urandom(24).hex(), "launch": 1, "node_count": 2}


@pytest.fixture
def make(accounted: SlurmCluster, tmp_path: Path) -> Callable[..., SlurmEngine]:
    def engine(shell: str = "sleep 100", **options: Any) -> SlurmEngine:
        return SlurmEngine(SlurmSettings(**options), tmp_path, lambda *_: ["/bin/sh", "-c", shell])

    return engine


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"extra": ("--account=nix",)}, "correct --account in DTRAIN_SLURM_EXTRA"),
        ({"extra": ("--qos=nix",)}, "correct --qos in DTRAIN_SLURM_EXTRA"),
        ({"extra": ("--qos=short",), "time_limit_minutes": 10}, "lower DTRAIN_SLURM_TIME_LIMIT_MINUTES"),
    ],
)
def test_refusals_of_an_account_name_the_setting(
    make: Callable[..., SlurmEngine], launch: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(SlurmError, match=said):
        make(**options).submit(launch, 0, 1)


def test_a_limit_of_submissions_is_waited_for(
    accounted: SlurmCluster, make: Callable[..., SlurmEngine], launch: dict[str, Any]
) -> None:
    engine = make(extra=("--qos=short",), time_limit_minutes=2)
    first = engine.submit(launch, 0, 1)
    with pytest.raises(EngineUnreachableError, match="takes no more jobs of this user now"):
        engine.submit(launch, 1, 1)
    engine.cancel([first], force=True)
    accounted.wait(lambda: [job.state for job in engine.list_jobs(launch)] == ["ended"], "its end")
    second = engine.submit(launch, 1, 1)
    assert second != first
    engine.cancel([second], force=True)


def test_the_accounting_has_the_end_that_slurmctld_forgot_and_the_seconds(
    accounted: SlurmCluster, make: Callable[..., SlurmEngine], launch: dict[str, Any]
) -> None:
    engine, began = make("sleep 3; exit 7"), time.time()
    job_id = engine.submit(launch, 0, 1)
    accounted.wait(lambda: f" {job_id} " not in f" {_queue(accounted)} ", "slurmctld to forget it", 180)
    accounted.wait(lambda: engine.list_jobs(launch), "the accounting", 90)
    (job,) = engine.list_jobs(launch)
    assert (job.id, job.state, job.exit_code, job.lost) == (job_id, "ended", 7, False)
    assert job.started_at is not None
    assert job.ended_at is not None
    assert began - 2 < job.started_at < job.ended_at
    # Whoever looks later, too: it is found by its output, and the accounting tells of it.
    later = make()
    assert later.submit(launch, 0, 1) == job_id
    assert [found.exit_code for found in later.list_jobs(launch)] == [7]
    told = engine.run(commands.account([name_job(launch, 0, 1)], began - 3600), "read the accounting")
    row = dict(zip(commands.ACCOUNTED, told.strip().split("|"), strict=True))
    assert row["JobName"] == name_job(launch, 0, 1)
    assert int(row["ElapsedRaw"]) == job.ended_at - job.started_at


def test_a_training_is_told_by_both_accounts(
    accounted: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LaunchSettings(engine="slurm", cluster_name="engine")
    manager = EngineClusterManager(tmp_path, settings, {"cpus": 1, "poll_seconds": 0.3})
    training = Training(manager, write_job(tmp_path, 300))
    training.submit()
    assert training.end() == JobState.SUCCEEDED, training.said()
    prices = tmp_path / "site.json"
    prices.write_text('{"main": 3600}')
    own = {"HOME": str(tmp_path), "CLUSTER": "slurm", "CLUSTER_NAME": "engine", "SLURM_PRICES": str(prices)}
    for name, value in own.items():
        monkeypatch.setenv(f"DTRAIN_{name}", value)

    def account() -> list[str]:
        return list(printed("dtrain cost", "one").get("account", ()))

    accounted.wait(lambda: "2 of 2 nodes in both" in "\n".join(account()), "the accounting", 60)
    lines = account()
    assert manager.describe_account("one") == lines, "what the asset cost_breakdown shows"
    shown = CliRunner().invoke(main, ["cost", "one"])
    assert "\n".join(lines) in shown.output
    [line] = printed("dtrain doctor")["lines"]
    assert (line["verdict"], line["seen"].startswith("slurm "), "answers" in line["seen"]) == ("ok", True, True)
    nodes = [line.split() for line in lines[1:3]]
    assert [(words[1], words[-1]) for words in nodes] == [("0", "completed"), ("1", "completed")]
    # SLURM counts whole seconds, from before the agent's start until after its end.
    assert all(-2.0 < float(words[-3]) < 15.0 for words in nodes)
    assert "by SLURM's accounting (2 nodes)" in lines[-1]


def _queue(cluster: SlurmCluster) -> str:
    return " ".join(cluster.ask("squeue", "-h", "--states=all", "-o", "%i").split())
