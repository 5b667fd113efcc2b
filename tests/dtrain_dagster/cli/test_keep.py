"""``--keep-failed``: its durations, and the clusters that cannot keep a node."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dtrain_dagster.cli.common import Refusal
from dtrain_dagster.cli.follow import stream_job
from dtrain_dagster.cli.main import main
from dtrain_dagster.cli.start import How, start_options
from dtrain_dagster.clusters.base import JobState, JobStatus
from dtrain_dagster.jobs.progress import follow_job
from dtrain_dagster.settings.environment import load_settings
from trainer.rundir import RunDir


@click.command()
@start_options
def command(how: How) -> None:
    click.echo(how.keep_failed_seconds)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *(("90s", "90.0\n"), ("30m", "1800.0\n"), ("1.5h", "5400.0\n"), (" 2h ", "7200.0\n")),
        *((text, "as 90s, 30m or 2h") for text in ("30", "m", "0m", "-5m", "1d", "30 minutes", "", "nan")),
        ("25h", "give less"),
    ],
)
def test_durations(text: str, said: str) -> None:
    found = CliRunner().invoke(command, ["--keep-failed", text])
    assert said in found.output
    assert (found.exit_code, "--keep-failed" in found.output) == ((0, False) if said.endswith("\n") else (2, True))


def test_a_cluster_that_cannot_keep_a_node_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    How(keep_failed_seconds=60.0).check(load_settings())
    assert "none is kept: look into " in capsys.readouterr().err
    How(keep_failed_seconds=0.0).check(load_settings())
    monkeypatch.setenv("DTRAIN_STORAGE", "az://data/x")
    with pytest.raises(Refusal, match=r"--keep-failed: .*studio.*slurm, kubernetes or ray"):
        How(keep_failed_seconds=60.0).check(load_settings(cluster="azure_ml"))


class FailedManager:
    """Answers of a cluster on one job: it runs, has failed with a node kept, and has ended."""

    def __init__(self) -> None:
        kept = ("node 1 is kept until 01:00 UTC: enter it",)
        failed = JobStatus(job_id="one", state=JobState.RUNNING, message="failed: rank 1\nits log", kept=kept)
        running = JobStatus(job_id="one", state=JobState.RUNNING)
        self.answers = [running, failed, failed, JobStatus(job_id="one", state=JobState.FAILED, message="rank 1")]

    poll_seconds = 0.0

    def job_status(self, job_id: str) -> JobStatus:
        return self.answers.pop(0)


TOLD = ("failed: rank 1", "node 1 is kept until 01:00 UTC: enter it", "give them back: dtrain cancel one")


def test_who_follows_a_training_is_told_once_how_to_enter_its_nodes(tmp_path: Path) -> None:
    manager: Any = FailedManager()
    news = [view.news for _, view in follow_job(manager, RunDir(str(tmp_path)), "one")]
    assert news == [(), TOLD, (), ()]


def test_who_follows_a_program_is_told_beside_its_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manager: Any = FailedManager()
    follower: Any = SimpleNamespace(read=lambda *_, **__: [], poll_seconds=0.0)
    assert stream_job(list, manager, "one", follower).state is JobState.FAILED  # type: ignore[arg-type]
    assert capsys.readouterr().err.splitlines() == list(TOLD)


@pytest.mark.slow
def test_the_duration_comes_into_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    words = ["launch", "--nodes", "1", "--procs-per-node", "1", "--name", "one", "--keep-failed", "90s", "--", "true"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    launch = RunDir(str(tmp_path / "storage/jobs/one")).read_json("launch.json") or {}
    assert launch["keep_failed_seconds"] == 90.0
