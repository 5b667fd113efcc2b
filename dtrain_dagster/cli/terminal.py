"""The output of `dtrain` in a terminal: the nodes' logs as they grow, a training's progress, tables of jobs.

On a terminal it has colours and is updated in place; in a file or a pipe it is plain lines.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtrain_dagster.clusters.base import ClusterHealth, GPUClusterManager, JobState, JobStatus, NodeHealth
from dtrain_dagster.dashboard.series import PerformanceDashboard
from dtrain_dagster.jobs.log_follower import LogFollower
from dtrain_dagster.jobs.progress import PLAN, JobProgress, advance, follow_job
from dtrain_dagster.jobs.totals import sum_presences
from dtrain_dagster.monitoring.hangs import hang_verdict
from dtrain_dagster.planning.projection import ProgressRate, TimeLeft, time_left
from dtrain_dagster.support.formatting import format_duration
from trainer.documents.events import ProfileEvent
from trainer.documents.presences import NodePresence, stale_seconds
from trainer.errors import DamagedError
from trainer.printable import visible
from trainer.rundir import LAUNCH, RunDir

NODE_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
STATE_COLOURS = {
    JobState.QUEUED: "yellow",
    JobState.RUNNING: "cyan",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "red",
    JobState.CANCELLED: "yellow",
}
LINE_EVERY_SECONDS = 5.0
"""The seconds between two lines of progress if there is no terminal."""
SILENT_NODE_SECONDS = 20.0
"""The seconds after which a node counts as silent; it reports every few (``training.monitor_interval_seconds``)."""


def print_lines(console: Console, lines: Iterable[tuple[int, str]]) -> None:
    """Print ``[node 0] …`` per line. Control characters in the processes' output, colours included, are made
    visible."""
    for node_id, line in lines:
        prefix = Text(f"[node {node_id}] ", style=NODE_COLOURS[node_id % len(NODE_COLOURS)])
        console.print(prefix.append(visible(line), style="default"), soft_wrap=True, highlight=False)


def stream_job(
    console: Console, manager: GPUClusterManager, job_id: str, follower: LogFollower, node_id: int | None = None
) -> JobStatus:
    """Print the logs as they grow, until the job has ended, and return its status."""
    while True:
        status = manager.job_status(job_id)  # asked first, so that the final round reads everything
        print_lines(console, follower.read(node_id, to_the_end=status.state.is_final))
        if status.state.is_final:
            return status
        time.sleep(follower.poll_seconds)


def watch_training(
    console: Console, manager: GPUClusterManager, rundir: RunDir, job_id: str, total_steps: int | None
) -> JobStatus:
    """Show a training's progress until it has ended; on a terminal with a line for each node."""
    clock = LeftClock(rundir)
    if not console.is_terminal:
        return _show_lines(console, follow_job(manager, rundir, job_id, take=clock.take), clock, total_steps)
    board = PerformanceDashboard()

    def take(events: list[dict[str, Any]]) -> None:
        board.take(events)
        clock.take(events)

    return _show_in_place(console, follow_job(manager, rundir, job_id, take=take), board, clock, total_steps)


class LeftClock:
    """The time left of one job, from its events and its plan."""

    def __init__(self, rundir: RunDir) -> None:
        self._rundir, self._pace = rundir, ProgressRate()
        self._plan: dict[str, Any] | None = None

    def take(self, events: list[dict[str, Any]]) -> None:
        """Add events, in order of time."""
        self._pace = self._pace.after(events)

    def left(self, status: JobStatus) -> TimeLeft | None:
        """Return the time left; None where it is not known, and for a job that has ended, however it did."""
        if status.state.is_final:
            return None
        if self._plan is None:
            with suppress(DamagedError):  # others refuse the job for it: here a figure is missing
                self._plan = self._rundir.read_json(PLAN)
        return time_left(self._pace, self._plan, time.time())


def _show_lines(
    console: Console, looks: Iterator[tuple[JobStatus, JobProgress]], clock: LeftClock, total_steps: int | None
) -> JobStatus:
    """A line for each phase, and one every few seconds."""
    shown_at, phase = 0.0, ""
    while True:
        status, progress = next(looks)
        _print_news(console, progress)
        now = time.monotonic()
        if progress.phase != phase or now - shown_at >= LINE_EVERY_SECONDS or status.state.is_final:
            phase, shown_at = progress.phase, now
            text = format_progress(progress, total_steps, clock.left(status))
            console.print(text, soft_wrap=True, highlight=False, markup=False)
        if status.state.is_final:
            return status


def _show_in_place(
    console: Console,
    looks: Iterator[tuple[JobStatus, JobProgress]],
    board: PerformanceDashboard,
    clock: LeftClock,
    total_steps: int | None,
) -> JobStatus:
    from rich.console import Group
    from rich.live import Live
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    column = TextColumn("{task.description}", markup=False)
    bar = Bar(SpinnerColumn(), BarColumn(bar_width=20), column, TimeElapsedColumn(), console=console)
    task = bar.add_task("waiting for nodes", total=total_steps)
    with Live(bar, console=console, refresh_per_second=4) as live:
        while True:
            status, progress = next(looks)
            _print_news(console, progress)
            total = total_steps or board.total_steps
            text = format_progress(progress, total, clock.left(status))
            bar.update(task, total=total, completed=progress.step, description=text)
            live.update(Group(bar, live_nodes_table(board, time.time())) if board.nodes else bar)
            if status.state.is_final:
                return status


def live_nodes_table(board: PerformanceDashboard, now: float) -> Table:
    """Return a row for each node that has reported: its state, and how it spends a step. Pure."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("NODE", "STATE", "GPU" if board.has_gpus else "CPU", "MEMORY", "SAMPLES/S", "WAITS", "TEMPERATURE"):
        table.add_column(title, justify="left" if title in ("NODE", "STATE") else "right")
    waiting = board.shares("waiting")

    def shown(value: object, form: str) -> str:
        return form.format(value) if value is not None else "–"

    for node, sample in sorted(board.nodes.items()):
        gpu = sample.get("gpu_utilization") is not None
        table.add_row(
            Text(str(node), style=NODE_COLOURS[node % len(NODE_COLOURS)]),
            node_state(board, node, now),
            shown(sample.get("gpu_utilization" if gpu else "cpu_percent"), "{:.0f} %"),
            shown(sample.get("gpu_memory_percent" if gpu else "memory_percent"), "{:.1f} %"),
            shown(sample.get("samples_per_second"), "{:,.0f}"),
            shown(waiting.get(node), "{:.0%}"),
            shown(sample.get("gpu_temperature_celsius"), "{:.0f} °C"),
        )
    return table


def node_state(board: PerformanceDashboard, node: int, now: float) -> Text:
    """Return the state in a word: lost to the others, done with all that it has to do, silent, training, or between
    trainings (evaluating, saving, waiting to join)."""
    silent = now - float(board.nodes[node]["time"])
    if node in board.lost:
        return Text("lost", style="red")
    if node in board.done:
        return Text("done", style="green")
    if silent > SILENT_NODE_SECONDS:
        return Text(f"silent for {silent:.0f} s", style="yellow")
    if node in board.members and board.nodes[node].get("samples_per_second") is not None:
        return Text("training", style="green")
    return Text("there", style="default")


def _print_news(console: Console, progress: JobProgress) -> None:
    for sentence in progress.news:
        console.print(f"! {sentence}", style="yellow", soft_wrap=True, highlight=False, markup=False)


def format_progress(progress: JobProgress, total_steps: int | None, left: TimeLeft | None = None) -> str:
    """Return phase, step, epoch, loss, speed, time left and nodes, as far as they are known. Pure."""
    parts = [progress.phase]
    if progress.step:
        parts.append(f"step {progress.step}" + (f"/{total_steps}" if total_steps else ""))
        parts += [f"epoch {progress.epoch}"] if progress.epoch else []
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.valid_loss is not None:
        parts.append(f"valid {progress.valid_loss:.4f}")
    if progress.samples_per_second is not None:
        parts.append(f"{progress.samples_per_second:,.0f} samples/s")
    if left is not None:
        parts.append(f"ETA {left.words}")
    nodes = f"{progress.nodes_alive} node" + ("" if progress.nodes_alive == 1 else "s")
    return " · ".join([*parts, nodes])


def print_health(console: Console, health: ClusterHealth) -> None:
    """Print the state of the cluster and of its nodes."""
    state = "healthy" if health.healthy else "unhealthy"
    console.print(f"cluster {health.cluster_name}: {health.message or state}", markup=False, highlight=False)
    if health.nodes:
        console.print(health_table(health.nodes))
    elif not health.message:
        console.print("no nodes: it is at rest")


def print_status(console: Console, status: JobStatus, rundir: RunDir, now: float) -> None:
    """Print the state of a job, and when each of its nodes was present."""
    console.print(f"job {status.job_id}: ", state_text(status.state), sep="")
    nodes, stale = rundir.nodes(), stale_seconds(rundir.storage)
    took = sum_presences(nodes, not status.state.is_final, now, stale)
    age = f"{took.words}; {took.node_hours_words}" if nodes else format_age(status, now)
    began = min((node.started_at for node in nodes), default=status.started_at)  # of the first launch
    console.print(f"started {time_of(began)}, {age}", highlight=False)
    progress, clock, heard = JobProgress(nodes_alive=status.nodes_alive), LeftClock(rundir), 0
    for events in rundir.looks():
        clock.take(events)
        progress, heard = advance(progress, events), heard + len(events)
    if heard:
        console.print(format_progress(progress, None, clock.left(status)), highlight=False, markup=False)
        if progress.hang:
            text = f"! {hang_verdict(progress.hang)}"
            console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(nodes_table(nodes, now, stale))
    studio = (rundir.read_json(LAUNCH) or {}).get("studio_url")
    for line in filter(None, (status.message, studio)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedJob:
    """A job in the table of all jobs."""

    status: JobStatus
    nodes: int = 0
    step: tuple[int, float] | None = None
    """The last step and its loss."""
    seconds: float | None = None
    """How long it took over all launches; None where it has one only, which its status tells."""


def jobs_table(listed: Iterable[ListedJob], now: float) -> Table:
    """Return a row for each job."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, options in (
        ("JOB", {"no_wrap": True}),
        ("STATE", {}),
        ("NODES", {"justify": "right"}),
        ("STARTED", {}),
        ("DURATION", {"justify": "right"}),
        ("STEP", {"justify": "right"}),
        ("LOSS", {"justify": "right"}),
    ):
        table.add_column(title, **options)
    jobs = list(listed)
    if is_damaged := any(job.status.damage for job in jobs):
        table.add_column("WHY", overflow="fold")
    for job in jobs:
        status, step = job.status, job.step
        table.add_row(
            visible(status.job_id),
            Text("damaged", style="red") if status.damage else state_text(status.state),
            str(job.nodes),
            time_of(status.started_at),
            format_age(status, now) if job.seconds is None else format_duration(job.seconds),
            *(("", "") if step is None else (str(step[0]), f"{step[1]:.4f}")),
            *([visible(status.damage)] if is_damaged else []),
        )
    return table


def nodes_table(presences: Iterable[NodePresence], now: float, stale: float) -> Table:
    """Return a row for each incarnation of a node: when it was present, and how it left. A node that is silent for more
    than ``stale`` seconds is not known to be present."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("LAUNCH", "NODE", "INCARNATION", "FROM", "FOR", "EXIT CODES"):
        table.add_column(title)
    for node in presences:
        silent = now - node.heard_at(now)
        if node.ended_at is not None:
            codes = ", ".join(map(str, node.exit_codes))
        else:
            codes = f"silent for {format_duration(silent)}" if silent > stale else "there"
        span = format_duration(node.seconds(now - node.clock_jump_seconds))
        numbers = (str(number) for number in (node.launch, node.node_id, node.incarnation))
        table.add_row(*numbers, time_of(node.started_at), span, codes)
    return table


def health_table(nodes: Iterable[NodeHealth]) -> Table:
    """Return a row for each node, with its state."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("NODE", "HEALTH", ""):
        table.add_column(title)
    for node in nodes:
        mark = Text("healthy", style="green") if node.healthy else Text("unhealthy", style="red")
        table.add_row(str(node.node_id), mark, Text(node.message))
    return table


def pairs_table(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return (name, figure) pairs in two columns."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for what, figure in pairs:
        table.add_row(what, figure)
    return table


def state_text(state: JobState) -> Text:
    """Return the state of a job in its colour."""
    return Text(state.value, style=STATE_COLOURS[state])


def time_of(seconds: float | None) -> str:
    """Return the local time of Unix ``seconds``, "" for None."""
    return "" if seconds is None else time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))


def format_age(status: JobStatus, now: float) -> str:
    """Return how long a job took, or has been running."""
    if status.started_at is None:
        return ""
    return format_duration(max(0.0, (status.ended_at or now) - status.started_at))


def operations_table(trace: ProfileEvent) -> Table:
    """Return the operations that took most of a trace, from a ``profile`` event."""
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.title = f"rank {trace.rank}, {trace.steps} steps up to {trace.step}"
    table.add_column("OPERATION", no_wrap=True)
    for title in ("ITS OWN TIME", "SHARE", "CALLS"):
        table.add_column(title, justify="right")
    for entry in trace.top:
        own = f"{1000 * entry['self_seconds']:.2f} ms"
        table.add_row(entry["name"], own, f"{entry['share']:.0%}", str(entry["calls"]))
    return table
