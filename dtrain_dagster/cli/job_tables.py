"""The table of all jobs in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from dtrain_dagster.cli.job_facts import JobFacts
from dtrain_dagster.cli.status import state_text, time_of
from dtrain_dagster.cli.tables import Column, print_fitted
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.printable import visible

JOB_COLUMNS = (
    Column("JOB"),
    Column("STATE"),
    Column("NODES", right=True, rank=5),
    Column("STARTED", rank=2),
    Column("TOOK", right=True, rank=1),
    Column("COST", right=True),
    Column("STEP", right=True, rank=4),
    Column("LOSS", right=True, rank=3),
)


def print_jobs(console: Console, jobs: Sequence[JobFacts]) -> None:
    """Print a row for each job, and below why those that are damaged cannot be read."""
    print_fitted(console, JOB_COLUMNS, [job_row(job) for job in jobs])
    for job in jobs:
        if job.status.damage:
            text = f"! {visible(job.status.job_id)} is damaged: {visible(job.status.damage)}"
            console.print(text, style="yellow", soft_wrap=True, highlight=False)


def job_row(job: JobFacts) -> list[str | Text]:
    """Return the cells of a job. Pure."""
    return [
        job.status.job_id,
        Text(job.state, style="red") if job.status.damage else state_text(job.status.state),
        str(job.nodes or ""),
        time_of(job.began_at, with_seconds=False),
        "" if job.seconds is None else format_duration(job.seconds),
        "" if job.usd is None else dollars(job.usd),
        *(("", "") if job.step is None else (str(job.step[0]), f"{job.step[1]:.4f}")),
    ]
