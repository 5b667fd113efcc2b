"""All readers of run directories in this project, run over a whole job and a damaged one beside it.

`tests.abuse.run_directories` damages the jobs; here they are only read and judged.
"""

from __future__ import annotations

import json
import re
import time
import traceback
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
from dtrain_dagster.dashboard.job_links import Places
from dtrain_dagster.dashboard.page import report_page
from dtrain_dagster.dashboard.server import exposition
from dtrain_dagster.fleet.jobs import FleetJob, Standing
from dtrain_dagster.fleet.launches import explain_launch_end
from dtrain_dagster.jobs.progress import choose_job, known_jobs, ran_out
from dtrain_dagster.jobs.view import last_step
from dtrain_dagster.planning.history import HomeHistory, JobCourse
from dtrain_dagster.planning.probe import payer_of
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
NOWHERE = Places()


class Readers:
    """The readers of one home, and the faults that they showed."""

    def __init__(self, home: Path, whole: str, damaged: str, secret: str) -> None:
        self.home, self.whole, self.damaged, self.secret = home, whole, damaged, secret
        self.settings = Settings(home=home, nodes=2)
        self.manager = LocalClusterManager(home)
        self.wrong: list[str] = []

    def say(self, words: str) -> None:
        """Record a fault."""
        self.wrong.append(words)

    def look(self, what: str, text: str) -> None:
        """Check a text that a person or a browser gets: it shows no secret, and no character that a terminal obeys."""
        if self.secret in text:
            self.say(f"{what} shows a file from outside")
        if found := OBEYED.search(text):
            self.say(f"{what} passes on {found[0]!r}")

    def of_damaged(self, what: str, read: Callable[[], object]) -> Any:
        """Run a reader of the damaged job alone, which may refuse it with an error in `MEANT`."""
        try:
            return read()
        except MEANT as error:
            if not isinstance(error, FileNotFoundError):
                self.look(what, str(error))
        except Exception:
            self.say(f"{what}: {traceback.format_exc(limit=-4)}")
        return None

    def of_all(self, what: str, read: Callable[[], object]) -> Any:
        """Run a reader of all jobs, which may not fail."""
        try:
            return read()
        except Exception:
            self.say(f"{what}: {traceback.format_exc(limit=-4)}")
            return None

    def command(self, *words: str, may_refuse: bool = True) -> str:
        """Run a command of `dtrain`, and return its output."""
        done = CliRunner().invoke(main, words, env={"DTRAIN_HOME": str(self.home)})
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            where = "".join(traceback.format_exception(done.exception, limit=-4))
            self.say(f"dtrain {' '.join(words)}: {where}")
        elif done.exit_code and not may_refuse:
            self.say(f"dtrain {' '.join(words)}: exit code {done.exit_code}: {done.output}")
        self.look(f"dtrain {words[0]}", done.output)
        return done.output


def read_everything(home: Path, whole: str, damaged: str, secret: str) -> list[str]:
    """Run all readers, and return the faults that they showed; empty for none."""
    readers = Readers(home, whole, damaged, secret)
    _lists(readers)
    _board(readers)
    _commands(readers)
    _one_job(readers)
    return readers.wrong


def _lists(readers: Readers) -> None:
    manager, whole, damaged = readers.manager, readers.whole, readers.damaged
    jobs = readers.of_all("list_jobs", manager.list_jobs) or []
    states = {job.job_id: (job.state.value, job.damage) for job in jobs}
    if states.get(whole) != ("succeeded", ""):
        readers.say(f"the whole job is listed as {states.get(whole)}")
    for job in jobs:
        readers.look("list_jobs", job.damage)
    readers.of_all("active_jobs", manager.active_jobs)
    readers.of_all("pools", manager.pools)
    readers.of_all("monitor_health", manager.monitor_health)
    readers.of_all("find_orphans", lambda: manager.find_orphans(set()))
    readers.of_all("past runs", lambda: _past_runs(readers))
    known = readers.of_all("known_jobs", lambda: known_jobs(manager, readers.settings.jobs_uri, "0a1b2c3d")) or []
    choice = readers.of_all("choose_job", lambda: choose_job("0a1b2c3d", "22222222", known))
    if choice and choice.job_id == damaged and any(job.damage for job in known if job.job_id == damaged):
        readers.say("a damaged job is chosen")


def _past_runs(readers: Readers) -> object:
    job = RunDir(f"{readers.settings.jobs_uri}/{readers.whole}").read_job()
    return HomeHistory(readers.home, 1, readers.settings.gpu_type, True).runs_like(job)


def _board(readers: Readers) -> None:
    board = JobBoard(readers.settings.jobs_uri, readers.settings.tiers[0])
    rows = {row.job_id: row for row in readers.of_all("the dashboard's list", board.jobs) or []}
    row = rows.get(readers.whole)
    if row is None or (row.state, row.step) != ("succeeded", STEPS):
        readers.say(f"the whole job's row is {row}")
    if readers.damaged not in rows:
        readers.say("the damaged job has no row")
    readers.look("the dashboard's list", json.dumps([str(row) for row in rows.values()], ensure_ascii=False))
    metrics = readers.of_all("/metrics", lambda: exposition(board).decode()) or ""
    if f'dtrain_step{{job="{readers.whole}"}} {STEPS}.0' not in metrics:
        readers.say("the whole job is not in /metrics")
    for job_id in (readers.whole, readers.damaged):
        job = readers.of_damaged("the dashboard", lambda job_id=job_id: board.open(job_id, time.time()))
        if job is not None:
            # As the server writes it: without NaN, and valid UTF-8.
            sent = readers.of_all("a job's figures", lambda job=job: _sent(job.snapshot(0, "", time.time())))
            facts = readers.of_all("a job's facts", lambda job=job: _sent(job.facts(NOWHERE)))
            if readers.secret in f"{sent}{facts}":
                readers.say("the dashboard shows a file from outside")
    readers.of_damaged("report", lambda: report_page(_rundir(readers), readers.settings.tiers[0]))


def _sent(value: object) -> str:
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    text.encode()
    return text


def _commands(readers: Readers) -> None:
    listed = readers.command("jobs", may_refuse=False)
    if not re.search(rf"{readers.whole}\s+succeeded", listed) or readers.damaged not in listed:
        readers.say(f"`dtrain jobs` lists {listed}")
    readers.command("doctor", may_refuse=False)
    for words in ("status", "cost --json", "logs"):
        readers.command(*words.split(), readers.whole, may_refuse=False)
    for words in (
        ("status", "--json"),
        ("status", "--follow"),
        ("logs", "--tail", "3"),
        ("logs", "--follow"),
        ("cost",),
    ):
        readers.command(words[0], *words[1:], readers.damaged)


def _one_job(readers: Readers) -> None:
    rundir = _rundir(readers)
    checkpoints = CheckpointManager(rundir, 3, "another")
    standing = Standing(job=FleetJob(job_id=readers.damaged, node_seconds=1.0), number=0)
    for read in (
        rundir.read_job, rundir.nodes, rundir.latest_checkpoint, rundir.last_generation,
        lambda: list(rundir.events()), lambda: list(rundir.events(strict=True)), lambda: rundir.last_step_reported(),
        lambda: last_step(rundir), lambda: generations(rundir.storage), lambda: presence.newest_generation(rundir),
        lambda: JobCourse.read(rundir), lambda: recent_events(rundir),
        rundir.read_result, lambda: summary_lines(rundir), checkpoints.load_latest,
        lambda: ran_out(rundir), lambda: launch_price(rundir, readers.settings.tiers[0]), lambda: payer_of(rundir),
        lambda: explain_launch_end(standing, rundir, readers.manager.job_status(readers.damaged), 0.0),
    ):  # fmt: skip
        readers.of_damaged(str(getattr(read, "__qualname__", read)), read)
    checkpoints.close(1.0)


def _rundir(readers: Readers) -> RunDir:
    return RunDir(f"{readers.settings.jobs_uri}/{readers.damaged}")
