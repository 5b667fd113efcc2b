"""The output of `dtrain` in a terminal: the nodes' logs as they grow, a training's progress, tables of jobs.

On a terminal it has colours and is updated in place; in a file or a pipe it is plain lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtrain_dagster.cli.json_output import print_json_line
from dtrain_dagster.cli.time_left import LeftClock
from dtrain_dagster.clusters.base import GPUClusterManager, JobState, JobStatus
from dtrain_dagster.dashboard.series import PerformanceDashboard
from dtrain_dagster.jobs.log_follower import LogFollower, time_in
from dtrain_dagster.jobs.progress import follow_job
from dtrain_dagster.jobs.view import JobView
from dtrain_dagster.planning.projection import TimeLeft, count_nodes, describe_training
from trainer.documents.events import ProfileEvent
from trainer.printable import visible
from trainer.rundir import RunDir

SEPARATOR = " · "
NODE_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
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


def print_json_lines(lines: Iterable[tuple[int, str]]) -> None:
    """Print a JSON document per line, with the fields of `dtrain_dagster.cli.json_fields.LOG_LINE`."""
    for node_id, line in lines:
        print_json_line({"time": time_in(line), "node": node_id, "text": line})


def stream_job(
    show: Callable[[Iterable[tuple[int, str]]], None], manager: GPUClusterManager, job_id: str, follower: LogFollower,
    node_id: int | None = None,
) -> JobStatus:  # fmt: skip
    """Have ``show`` print the logs, pairs of node and line, as they grow, until the job has ended, and return its
    status."""
    while True:
        status = manager.job_status(job_id)  # asked first, so that the final round reads everything
        show(follower.read(node_id, to_the_end=status.state.is_final))
        if status.state.is_final:
            return status
        time.sleep(follower.poll_seconds)


def watch_training(
    console: Console,
    manager: GPUClusterManager,
    rundir: RunDir,
    job_id: str,
    total_steps: int | None,
    clock: LeftClock,
) -> JobStatus:
    """Show a training's progress until it has ended; on a terminal with a line for each node."""
    if not console.is_terminal:
        return _show_lines(console, follow_job(manager, rundir, job_id), clock, total_steps)
    board = PerformanceDashboard()
    looks = follow_job(manager, rundir, job_id, take=board.take)
    return _show_in_place(console, looks, board, clock, total_steps)


def _show_lines(
    console: Console, looks: Iterator[tuple[JobStatus, JobView]], clock: LeftClock, total_steps: int | None
) -> JobStatus:
    """A line for each phase, and one every few seconds."""
    shown_at, phase = 0.0, ""
    while True:
        status, progress = next(looks)
        _print_news(console, progress)
        now, left = time.monotonic(), clock.left(status, progress)
        text = format_progress(progress, total_steps or progress.total_steps, left, status.state)
        now_in = text.partition(SEPARATOR)[0]
        if now_in != phase or now - shown_at >= LINE_EVERY_SECONDS or status.state.is_final:
            phase, shown_at = now_in, now
            console.print(text, soft_wrap=True, highlight=False, markup=False)
        if status.state.is_final:
            return status


def _show_in_place(
    console: Console,
    looks: Iterator[tuple[JobStatus, JobView]],
    board: PerformanceDashboard,
    clock: LeftClock,
    total_steps: int | None,
) -> JobStatus:
    """A bar, the line of progress, which may take two lines of the terminal, and a row for each node."""
    from rich.console import Group
    from rich.live import Live
    from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn
    from rich.progress import Progress as Bar

    bar = Bar(SpinnerColumn(finished_text=" "), BarColumn(bar_width=40), TaskProgressColumn(), console=console)
    task = bar.add_task("", total=total_steps)
    with Live(bar, console=console, refresh_per_second=4) as live:
        while True:
            status, progress = next(looks)
            _print_news(console, progress)
            total = total_steps or progress.total_steps
            bar.update(task, total=total, completed=progress.step)
            text = format_progress(progress, total, clock.left(status, progress), status.state)
            line = Text("\n".join(wrap_parts(text, console.width)))
            nodes = [live_nodes_table(board, time.time())] if board.nodes and not status.state.is_final else []
            live.update(Group(line, *nodes) if status.state.is_final else Group(bar, line, *nodes))
            if status.state.is_final:
                return status


def wrap_parts(text: str, width: int) -> list[str]:
    """Return a line of progress as lines of at most ``width``, none of which ends within a part. Pure."""
    lines: list[str] = []
    for part in text.split(SEPARATOR):
        if lines and len(lines[-1]) + len(SEPARATOR) + len(part) <= width:
            lines[-1] += SEPARATOR + part
        else:
            lines.append(part)
    return lines


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


def _print_news(console: Console, progress: JobView) -> None:
    for sentence in progress.news:
        console.print(f"! {sentence}", style="yellow", soft_wrap=True, highlight=False, markup=False)


def format_progress(
    progress: JobView, total_steps: int | None, left: TimeLeft | None = None, state: JobState | None = None
) -> str:
    """Return phase, step, epoch, time left, loss, speed and nodes in one line, as far as they are known. ``state``: of
    the job, as `describe_training` has it. Pure."""
    nodes = [] if state is not None and state.is_final else [count_nodes(progress.nodes_alive)]
    return SEPARATOR.join([*describe_training(progress, total_steps, left, state), *nodes])


def pairs_table(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return (name, figure) pairs in two columns."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for what, figure in pairs:
        table.add_row(what, figure)
    return table


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
