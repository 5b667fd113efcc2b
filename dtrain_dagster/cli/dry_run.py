"""`--dry-run`: what a start would ask the cluster for, with its price and what is in its way; nothing is asked for.

What is printed on standard output is made by the functions that make the real requests
(`GPUClusterManager.describe_submission`), so that it can go into a file, and to the tool that takes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import click

from dtrain_dagster.cli.ceilings import book_of, ceiling_lines
from dtrain_dagster.cli.common import EXIT_UNUSABLE, say
from dtrain_dagster.cli.doctor import examine_without_writing
from dtrain_dagster.clusters.base import ClusterError, GPUClusterManager, JobSpec
from dtrain_dagster.jobs.promises import Wanted
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.settings.home import HomeError
from trainer.config import JobConfig

NOTHING = "dry run: nothing was bought, submitted or written"


def dry_run_option(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the option ``--dry-run``."""
    text = "Print what would be submitted, its price and what is in its way; submit nothing."
    return click.option("--dry-run", "is_dry", is_flag=True, help=text)(command)


def show_dry_run(
    settings: Settings,
    manager: GPUClusterManager,
    spec: JobSpec,
    sku: str,
    wanted: Wanted,
    job: JobConfig | None = None,
) -> None:
    """Print how the ceilings would stand, what the doctor sees, and each request of a start; then end the command, with
    the code of a refusal where the start would be refused. ``sku``: of the nodes that are asked for first."""
    problems = []
    judged = book_of(settings).judge(wanted)
    for line in ceiling_lines(judged, wanted):
        say(line, err=True)
    if refusal := judged.refusal:
        problems.append(refusal)
    for check in examine_without_writing(settings, spec.node_count):
        say(f"{check.verdict}: {check.check}: {check.seen}" + (f" → {check.remedy}" if check.remedy else ""), err=True)
        if check.verdict == "missing":
            problems.append(f"{check.check}: {check.seen}")
    try:
        document = None if job is None else json.loads(job.to_json())
        for request in manager.describe_submission(spec, sku, document):
            say(request.written())
    except (ClusterError, HomeError) as error:
        if str(error) not in "".join(problems):
            problems.append(str(error))
    for problem in problems:
        say(f"refused: {problem}", err=True)
    say(NOTHING, err=True)
    sys.exit(EXIT_UNUSABLE if problems else 0)
