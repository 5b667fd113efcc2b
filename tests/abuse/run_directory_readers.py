"""All readers of run directories in this project, run over a whole job and a damaged one beside it.

`tests.abuse.run_directories` damages the jobs; here they are only read and judged.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from dtrain_dagster.cli.facts import summary_lines
from dtrain_dagster.cli.main import main
from dtrain_dagster.clusters import presence
from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.costs.plan import launch_price
from dtrain_dagster.costs.prices import PriceError
from dtrain_dagster.dashboard.job_board import JobBoard
from dtrain_dagster.dashboard.job_facts import Places
from dtrain_dagster.dashboard.job_list import list_page
from dtrain_dagster.dashboard.metrics import exposition
from dtrain_dagster.dashboard.page import report_page
from dtrain_dagster.fleet.jobs import FleetJob, Standing
from dtrain_dagster.fleet.runner import explain_launch_end
from dtrain_dagster.jobs.progress import choose_job, known_jobs
from dtrain_dagster.jobs.start import ran_out
from dtrain_dagster.jobs.view import last_step
from dtrain_dagster.planning.evidence import HomeHistory, JobCourse, payer_of
from dtrain_dagster.sensors.cost_overrun import recent_events
from dtrain_dagster.settings.environment import Settings
from trainer.checkpoint.manager import CheckpointError, CheckpointManager
from trainer.elastic.generation_record import generations
from trainer.errors import ConfigError, DamagedError
from trainer.rundir import RunDir

STEPS = 18
"""Steps of the whole job."""
OBEYED = re.compile("[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal would obey, without the carriage return, which CSV has."""
MEANT = (DamagedError, ConfigError, ClusterError, CheckpointError, PriceError, FileNotFoundError)
"""Errors that a reader of a damaged job may raise."""


class Readers:
    """The readers of one home, with a whole job and a damaged one in it."""

    def __init__(self, home: Path, whole: str, damaged: str, secret: str) -> None:
        self.home, self.whole, self.damaged, self.secret = home, whole, damaged, secret
        self.settings = Settings(home=home, nodes=2)
        self.manager = LocalClusterManager(home)

    def look(self, text: str) -> str:
        """Check a text that a person or a browser gets: it shows no secret, and no character that a terminal obeys."""
        assert self.secret not in text, "a file from outside is shown"
        assert OBEYED.search(text) is None, text
        return text

    def of_damaged(self, read: Callable[[], Any]) -> Any:
        """Run a reader of the damaged job alone, which may refuse it with an error in `MEANT`."""
        try:
            return read()
        except MEANT as error:
            if not isinstance(error, FileNotFoundError):
                self.look(str(error))
            return None

    def command(self, words: str, may_refuse: bool = False) -> str:
        """Run a command of `dtrain`, and return its output."""
        done = CliRunner().invoke(main, words.split(), env={"DTRAIN_HOME": str(self.home)})
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert may_refuse or done.exit_code == 0, (words, done.output)
        return self.look(done.output)


def read_everything(home: Path, whole: str, damaged: str, secret: str) -> None:
    """Run all readers. Raise where one cannot do without the damaged job, or shows what it must not."""
    readers = Readers(home, whole, damaged, secret)
    _lists(readers)
    _board(readers)
    _commands(readers)
    _one_job(readers)


def _lists(readers: Readers) -> None:
    manager, settings, damaged = readers.manager, readers.settings, readers.damaged
    jobs = {job.job_id: job for job in manager.list_jobs()}
    assert (jobs[readers.whole].state.value, jobs[readers.whole].damage) == ("succeeded", "")
    for job in jobs.values():
        readers.look(job.damage)
    manager.active_jobs()
    manager.pools()
    manager.monitor_health()
    manager.find_orphans(set())
    job = RunDir(f"{settings.jobs_uri}/{readers.whole}").read_job()
    HomeHistory(readers.home, 1, settings.gpu_type, True).runs_like(job)
    known = known_jobs(manager, settings.jobs_uri, "0a1b2c3d")
    choice = choose_job("0a1b2c3d", "22222222", known)
    assert choice.job_id != damaged or not any(job.damage for job in known if job.job_id == damaged)


def _board(readers: Readers) -> None:
    board = JobBoard(readers.settings.jobs_uri, readers.settings.tiers[0])
    rows = {row.job_id: row for row in board.jobs()}
    assert (rows[readers.whole].state, rows[readers.whole].step) == ("succeeded", STEPS)
    assert readers.damaged in rows
    readers.look(json.dumps([str(row) for row in rows.values()], ensure_ascii=False))
    readers.look(list_page(board.listing(), "", "", 100))
    assert f'dtrain_step{{job="{readers.whole}"}} {STEPS}.0' in readers.look(exposition(board).decode())
    for job_id in (readers.whole, readers.damaged):
        job = readers.of_damaged(lambda job_id=job_id: board.open(job_id, time.time()))
        if job is not None:
            for value in (job.snapshot(0, "", time.time()), job.facts(Places())):
                sent = json.dumps(value, allow_nan=False, ensure_ascii=False)  # as the server writes it
                sent.encode()
                assert readers.secret not in sent
    readers.of_damaged(lambda: report_page(_rundir(readers), readers.settings.tiers[0]))


def _commands(readers: Readers) -> None:
    listed = readers.command("jobs")
    assert re.search(rf"{readers.whole}\s+succeeded", listed)
    assert readers.damaged in listed
    for words in ("doctor", *(f"{each} {readers.whole}" for each in ("status", "cost --json", "logs"))):
        readers.command(words)
    for words in ("status --json", "status --follow", "logs --tail 3", "logs --follow", "cost"):
        readers.command(f"{words} {readers.damaged}", may_refuse=True)


def _one_job(readers: Readers) -> None:
    rundir = _rundir(readers)
    checkpoints = CheckpointManager(rundir, 3, "another")
    standing = Standing(job=FleetJob(job_id=readers.damaged, node_seconds=1.0), number=0)
    for read in (
        rundir.read_job, rundir.nodes, rundir.latest_checkpoint, rundir.last_generation,
        lambda: list(rundir.events()), lambda: list(rundir.events(strict=True)), rundir.last_step_reported,
        lambda: last_step(rundir), lambda: generations(rundir.storage), lambda: presence.newest_generation(rundir),
        lambda: JobCourse.read(rundir), lambda: recent_events(rundir),
        rundir.read_result, lambda: summary_lines(rundir), checkpoints.load_latest,
        lambda: ran_out(rundir), lambda: launch_price(rundir, readers.settings.tiers[0]), lambda: payer_of(rundir),
        lambda: explain_launch_end(standing, rundir, readers.manager.job_status(readers.damaged), 0.0),
    ):  # fmt: skip
        readers.of_damaged(read)
    checkpoints.close(1.0)


def _rundir(readers: Readers) -> RunDir:
    return RunDir(f"{readers.settings.jobs_uri}/{readers.damaged}")
