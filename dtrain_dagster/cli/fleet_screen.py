"""A fleet in a terminal: its table, and its line of progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.text import Text

from dtrain_dagster.cli.follow import LINE_EVERY_SECONDS, in_place
from dtrain_dagster.cli.screen import Column, fitted_table, state_text
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.printable import visible

if TYPE_CHECKING:
    from dtrain_dagster.fleet.view import FleetRow, FleetView, FleetWatch

MOST_NAMED = 3
"""Jobs that are named of those of which the same is said."""
VIEW_EVERY_SECONDS = 2.0


def headline(view: FleetView) -> str:
    """Return the fleet in one line. Pure."""
    parts = [
        f"fleet {view.name}: {view.over} of {len(view.jobs)} jobs over",
        f"{view.busy_nodes} of {view.nodes} nodes",
        f"{dollars(view.used_usd)} of {dollars(view.budget_usd)}",
    ]
    if view.ends_in_seconds is not None:
        of = " of the jobs that are known" if view.may_grow else ""
        parts.append(f"ETA{of} {format_duration(view.ends_in_seconds)}")
    is_over = view.over == len(view.jobs)
    if view.deadline is not None and not is_over:
        parts.append(f"deadline in {format_duration(max(0.0, view.deadline - view.at))}")
    if not is_over and not view.is_run:
        parts.append("no process runs it: `dtrain fleet FILE` continues it")
    return " · ".join(parts)


COLUMNS = (
    *(Column("JOB"), Column("STATE"), Column("PRIORITY", right=True, rank=6), Column("NODES", right=True, rank=2)),
    *(Column("STEP", right=True, rank=4), Column("LOSS", right=True, rank=5)),
    *(Column("LEFT", right=True, rank=1), Column("COST", right=True)),
)


def fleet_table(view: FleetView, width: int) -> Group:
    """Return a row for each job, in a table that fits into ``width``, and below why jobs are where they are. Pure."""
    table, left_out = fitted_table(COLUMNS, [job_row(job) for job in view.jobs], width)
    more: list[Text] = []
    if left_out:
        more.append(Text(f"{width} columns leave out {', '.join(left_out)} (--json has all)", style="dim"))
    whys: dict[str, list[str]] = {}
    for job in view.jobs:
        if job.why:
            whys.setdefault(visible(job.why), []).append(visible(job.job_id))
    for why, jobs in whys.items():
        more.append(Text(f"{name_some(jobs)}: {why}", style="dim"))
    return Group(table, *more)


def name_some(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are. Pure."""
    left = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {left} more" if left > 0 else "")


def job_row(job: FleetRow) -> list[str | Text]:
    """Return the cells of a job. Pure."""
    return [
        job.job_id,
        state_text(job.state),
        str(job.priority),
        str(job.nodes or ""),
        "" if job.step is None else f"{job.step}" + (f"/{job.total_steps}" if job.total_steps else ""),
        _loss(job),
        "" if job.seconds_left is None else format_duration(job.seconds_left),
        dollars(job.usd) if job.launches else "",
    ]


def _loss(job: FleetRow) -> str:
    loss = job.valid_loss if job.valid_loss is not None else job.loss
    return "" if loss is None else f"{loss:.4f}"


@contextmanager
def fleet_screen(console: Console, watch: FleetWatch, is_shown: bool = True) -> Iterator[Callable[[], None]]:
    """Yield a function that shows the fleet as it is now, if some time has passed: on a terminal a table that is
    updated in place, else a line now and then. ``is_shown``: whether it does."""
    if not is_shown:
        yield lambda: None
        return
    shown_at, every = 0.0, VIEW_EVERY_SECONDS if console.is_terminal else LINE_EVERY_SECONDS
    with in_place(console) as show:

        def update() -> None:
            nonlocal shown_at
            if time.monotonic() - shown_at < every:
                return
            shown_at, view = time.monotonic(), watch.view()
            if console.is_terminal:
                show(Group(Text(headline(view)), fleet_table(view, console.width)))
            else:
                console.print(headline(view), soft_wrap=True, highlight=False, markup=False)

        yield update
