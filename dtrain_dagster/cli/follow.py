"""Follow a job or a fleet in a terminal: logs of nodes as they grow, a training's progress, the table of a fleet.

On a terminal it has colours and is updated in place; in a file or a pipe it is plain lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn
from rich.text import Text

from dtrain_dagster.cli.common import console, manager_of, print_json, run_dir, say
from dtrain_dagster.cli.facts import SEPARATOR, format_progress, left_of, read_plan
from dtrain_dagster.cli.screen import fitted_table, name_some, state_text, words_of_left_out
from dtrain_dagster.clusters.base import GPUClusterManager, JobStatus
from dtrain_dagster.jobs.log_follower import LogFollower, time_in
from dtrain_dagster.jobs.progress import follow_job, words_of_kept
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.printable import visible
from trainer.rundir import RunDir

if TYPE_CHECKING:
    from dtrain_dagster.fleet.view import FleetRow, FleetView, FleetWatch
    from dtrain_dagster.settings.environment import Settings

NODE_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
LINE_EVERY_SECONDS = 5.0
"""The seconds between two lines of progress if there is no terminal."""


@contextmanager
def in_place(
    console: Console, is_kept: bool = False, is_shown: bool = True
) -> Iterator[Callable[[RenderableType], None]]:
    """Yield a function that shows something in the place of what it showed before. Where there is no terminal, it shows
    nothing. ``is_kept``: whether the last of it stays."""
    if not (is_shown and console.is_terminal):
        yield lambda shown: None
        return
    with Live(console=console, transient=not is_kept, refresh_per_second=4) as live:
        yield live.update


class Bar:
    """A bar with a line below it, which may take several lines, so that nothing of it is cut off."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            SpinnerColumn(finished_text=" "), BarColumn(bar_width=40), TaskProgressColumn(), console=console
        )
        self._task = self._bar.add_task("", total=None)

    def at(self, text: str, completed: float, total: float | None) -> Group:
        """Return it at this much of the total, over a line of text."""
        self._bar.update(self._task, completed=completed, total=total)
        return Group(self._bar, Text(visible(text)))


def warn(console: Console, sentence: str) -> None:
    """Print what a person should know, above what is updated in place."""
    console.print(f"! {visible(sentence)}", style="yellow", soft_wrap=True, highlight=False, markup=False)


def print_lines(console: Console, lines: Iterable[tuple[int, str]]) -> None:
    """Print ``[node 0] …`` per line. Control characters in the processes' output, colours included, are made
    visible."""
    for node_id, line in lines:
        prefix = Text(f"[node {node_id}] ", style=NODE_COLOURS[node_id % len(NODE_COLOURS)])
        console.print(prefix.append(visible(line), style="default"), soft_wrap=True, highlight=False)


def print_json_lines(lines: Iterable[tuple[int, str]]) -> None:
    """Print a JSON document per line."""
    for node_id, line in lines:
        print_json({"time": time_in(line), "node": node_id, "text": line}, indent=None)


def stream_job(
    show: Callable[[Iterable[tuple[int, str]]], None],
    manager: GPUClusterManager,
    job_id: str,
    follower: LogFollower,
    node_id: int | None = None,
) -> JobStatus:
    """Have ``show`` print the logs, pairs of node and line, as they grow, until the job has ended, and return its
    status."""
    kept: tuple[str, ...] = ()
    while True:
        status = manager.job_status(job_id)  # asked first, so that the final round reads everything
        if status.kept and status.kept != kept:
            kept = status.kept
            for line in words_of_kept(status):
                say(visible(line), err=True)
        show(follower.read(node_id, to_the_end=status.state.is_final))
        if status.state.is_final:
            return status
        time.sleep(follower.poll_seconds)


def follow_training(settings: Settings, job_id: str) -> JobStatus:
    """Show a training's progress on the standard output until it has ended, and return how."""
    return watch_training(console(), manager_of(settings), run_dir(settings, job_id), job_id)


def watch_training(console: Console, manager: GPUClusterManager, rundir: RunDir, job_id: str) -> JobStatus:
    """Show a training's progress until it has ended. On a terminal that is a bar and the line of progress; elsewhere a
    line for each phase, and one every few seconds."""
    bar, plan, phase, shown_at = Bar(console), read_plan(rundir), "", 0.0
    with in_place(console, is_kept=True) as show:
        for status, progress in follow_job(manager, rundir, job_id):
            for sentence in progress.news:
                warn(console, sentence)
            text, now = format_progress(progress, left_of(status, progress, plan), status.state), time.monotonic()
            now_in = text.partition(SEPARATOR)[0]
            if console.is_terminal:
                is_over = status.state.is_final
                show(Text(visible(text)) if is_over else bar.at(text, progress.step, progress.total_steps))
            elif now_in != phase or now - shown_at >= LINE_EVERY_SECONDS or status.state.is_final:
                phase, shown_at = now_in, now
                console.print(text, soft_wrap=True, highlight=False, markup=False)
    return status


VIEW_EVERY_SECONDS = 2.0


def headline(view: FleetView) -> str:
    """Return the fleet in one line. Pure."""
    parts = [
        f"fleet {view.name}: {view.over} of {len(view.jobs)} jobs over",
        f"{view.busy_nodes} of {view.nodes} nodes",
        f"{dollars(view.used_usd)} of {dollars(view.budget_usd)}",
    ]
    if view.ends_in_seconds is not None:
        parts.append(f"ETA of these {format_duration(view.ends_in_seconds)}")
    is_over = view.over == len(view.jobs)
    if view.deadline is not None and not is_over:
        parts.append(f"deadline in {format_duration(max(0.0, view.deadline - view.at))}")
    if not is_over and not view.is_run:
        parts.append("no process runs it: `dtrain fleet FILE` continues it")
    return " · ".join(parts)


FLEET_COLUMNS = ("JOB", "STATE", "COST", "LEFT", "NODES", "STEP", "LOSS", "PRIORITY")


def fleet_table(view: FleetView, width: int) -> Group:
    """Return a row for each job, in a table that fits into ``width``, and below why jobs are where they are. Pure."""
    table, left_out = fitted_table(FLEET_COLUMNS, [job_row(job) for job in view.jobs], width, FLEET_COLUMNS[2:], 3)
    more: list[Text] = []
    if left_out:
        more.append(Text(words_of_left_out(left_out, width), style="dim"))
    whys: dict[str, list[str]] = {}
    for job in view.jobs:
        if job.why:
            whys.setdefault(visible(job.why), []).append(visible(job.job_id))
    for why, jobs in whys.items():
        more.append(Text(f"{name_some(jobs)}: {why}", style="dim"))
    return Group(table, *more)


def job_row(job: FleetRow) -> list[str | Text]:
    """Return the cells of a job. Pure."""
    loss = job.valid_loss if job.valid_loss is not None else job.loss
    return [
        job.job_id,
        state_text(job.state),
        dollars(job.usd) if job.launches else "",
        "" if job.seconds_left is None else format_duration(job.seconds_left),
        str(job.nodes or ""),
        "" if job.step is None else f"{job.step}" + (f"/{job.total_steps}" if job.total_steps else ""),
        "" if loss is None else f"{loss:.4f}",
        str(job.priority),
    ]


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
