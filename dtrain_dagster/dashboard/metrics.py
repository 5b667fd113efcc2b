"""Figures of the jobs that run or that ended within the last hour, for Prometheus, by its conventions: base units,
ratios instead of percents, ``_total`` for counters that only grow. Nothing is kept between two scrapes except the
figures in `JobBoard`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from dtrain_dagster.dashboard.job_board import JobBoard, OpenJob
from dtrain_dagster.dashboard.series import is_number
from dtrain_dagster.jobs.view import UNREADABLE
from trainer.documents.events import TimingEvent

Value = tuple[tuple[str, ...], Any]
"""Labels besides the job's, and the figure."""
Read = Callable[[OpenJob], Iterable[Value]]


def _of_job(figure: Callable[[OpenJob], Any]) -> Read:
    return lambda job: [((), figure(job))]


def _of_last_step(column: str) -> Read:
    def figure(job: OpenJob) -> float | None:
        track = job.dashboard.tracks.get("steps")
        return track.rows[-1].get(column) if track and track.rows else None

    return _of_job(figure)


def _of_nodes(column: str, unit: float = 1.0) -> Read:
    return lambda job: (((str(node),), _scaled(sample, column, unit)) for node, sample in _samples(job))


def _of_gpus(column: str, unit: float = 1.0) -> Read:
    return lambda job: (
        ((str(node), str(gpu["index"])), _scaled(gpu, column, unit))
        for node, sample in _samples(job)
        for gpu in sample.get("gpus") or ()
    )


def _samples(job: OpenJob) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the newest sample of each node that was not lost."""
    board = job.dashboard
    return ((node, sample) for node, sample in board.nodes.items() if node not in board.lost)


def _scaled(sample: Mapping[str, Any], column: str, unit: float) -> float | None:
    value = sample.get(column)
    return float(value) * unit if value is not None and is_number(value) else None


def _of_window(read: Callable[[TimingEvent], Iterable[Value]]) -> Read:
    """Read the newest window of timings."""
    return lambda job: (value for window in list(job.dashboard.windows)[-1:] for value in read(window))


def _segments(window: TimingEvent) -> Iterator[Value]:
    for segment, values in window.segments.items():
        for rank, (node, seconds) in enumerate(zip(window.nodes, values, strict=True)):
            yield (str(node), str(rank), segment), seconds


def _lateness(window: TimingEvent) -> Iterator[Value]:
    for rank, (node, late) in enumerate(zip(window.nodes, window.typical.get("late", ()), strict=False)):
        yield (str(node), str(rank)), late


def _collectives(window: TimingEvent) -> Iterator[Value]:
    for entry in window.collectives:
        yield (entry.name, "network"), entry.wire_seconds
        yield (entry.name, "waiting"), statistics.fmean(entry.waiting_seconds or (0.0,))
        yield (entry.name, "overlapped"), statistics.fmean(entry.overlapped_seconds or (0.0,))


def _time_left(job: OpenJob) -> float | None:
    left = job.time_left(time.time())
    return left.seconds if left is not None else None


METRICS: dict[str, tuple[str, tuple[str, ...], Read]] = {
    "dtrain_job_running": ("1 while the job has not ended", (), _of_job(lambda job: int(job.row.running))),
    "dtrain_job_start_timestamp_seconds": ("When it was started", (), _of_job(lambda job: job.row.began_at)),
    "dtrain_last_event_timestamp_seconds": (
        "Time of the newest event", (), _of_job(lambda job: job.dashboard.heard_at),
    ),
    "dtrain_step": ("Last optimizer step that was reported", (), _of_job(lambda job: job.dashboard.view.step)),
    "dtrain_planned_steps": ("Planned optimizer steps", (), _of_job(lambda job: job.dashboard.view.total_steps)),
    "dtrain_epoch": ("Epoch, counted from 1", (), _of_job(lambda job: job.dashboard.view.epoch or None)),
    "dtrain_loss": ("Training loss per sample", (), _of_job(lambda job: job.dashboard.view.loss)),
    "dtrain_validation_loss": ("Validation loss per sample", (), _of_job(lambda job: job.dashboard.view.valid_loss)),
    "dtrain_learning_rate": ("Learning rate", (), _of_last_step("learning_rate")),
    "dtrain_gradient_norm": ("2-norm of the gradient before clipping", (), _of_last_step("grad_norm")),
    "dtrain_samples_per_second": ("Over all nodes", (), _of_job(lambda job: job.dashboard.view.samples_per_second)),
    "dtrain_step_seconds": ("Wall seconds of an optimizer step", (), _of_last_step("step_seconds")),
    "dtrain_time_left_seconds": ("Estimate of the time until the job ends", (), _of_job(_time_left)),
    "dtrain_nodes_alive": ("Nodes that are there", (), _of_job(lambda job: job.nodes_alive(time.time()))),
    "dtrain_cost_dollars": (
        "Node-hours at the price of the plan, without probes; not a bill", (), _of_job(lambda job: job.row.usd),
    ),
    "dtrain_node_samples_per_second": ("Of the node's ranks", ("node",), _of_nodes("samples_per_second")),
    "dtrain_node_cpu_utilization_ratio": (
        "The ranks' share of the machine's processors", ("node",), _of_nodes("cpu_percent", 0.01),
    ),
    "dtrain_node_memory_used_bytes": ("Resident memory of the ranks", ("node",), _of_nodes("memory_used_bytes")),
    "dtrain_node_memory_utilization_ratio": (
        "The same as a share of the machine's", ("node",), _of_nodes("memory_percent", 0.01),
    ),
    "dtrain_node_disk_used_ratio": (
        "Share of the disk that is in use", ("node",), _of_nodes("disk_used_percent", 0.01),
    ),
    "dtrain_node_network_transmit_bytes_per_second": ("All interfaces", ("node",), _of_nodes("bytes_sent_per_second")),
    "dtrain_node_network_receive_bytes_per_second": (
        "All interfaces", ("node",), _of_nodes("bytes_received_per_second"),
    ),
    "dtrain_node_disk_read_bytes_per_second": ("All disks", ("node",), _of_nodes("disk_read_bytes_per_second")),
    "dtrain_node_disk_written_bytes_per_second": ("All disks", ("node",), _of_nodes("disk_written_bytes_per_second")),
    "dtrain_gpu_utilization_ratio": ("Utilisation of a GPU", ("node", "gpu"), _of_gpus("utilization", 0.01)),
    "dtrain_gpu_memory_used_bytes": ("Memory in use", ("node", "gpu"), _of_gpus("memory_used_bytes")),
    "dtrain_gpu_memory_total_bytes": ("Memory that it has", ("node", "gpu"), _of_gpus("memory_total_bytes")),
    "dtrain_gpu_temperature_celsius": ("Temperature", ("node", "gpu"), _of_gpus("temperature_celsius")),
    "dtrain_gpu_power_watts": ("Power", ("node", "gpu"), _of_gpus("power_watts")),
    "dtrain_step_segment_seconds": (
        "Where an optimizer step's time goes; segments add up to the step",
        ("node", "rank", "segment"), _of_window(_segments),
    ),
    "dtrain_rank_lateness_seconds": (
        "How much less a rank waited than the one that waited most, median", ("node", "rank"), _of_window(_lateness),
    ),
    "dtrain_collective_seconds": (
        "Time of a collective per step: network, waiting, hidden by computation",
        ("collective", "part"), _of_window(_collectives),
    ),
    "dtrain_collective_bandwidth_bytes_per_second": (
        "Bus bandwidth", ("collective",),
        _of_window(lambda window: [((each.name,), each.bandwidth_bytes_per_second) for each in window.collectives]),
    ),
}  # fmt: skip
"""Gauges: what each means, its labels besides the job's, and what reads it."""
COUNTER_METRICS = {
    "dtrain_nodes_lost_total": ("Nodes that were lost while the others went on", "nodes_lost"),
    "dtrain_hangs_total": ("Times that a rank was found hanging", "hang"),
    "dtrain_checkpoint_failures_total": ("Tries to save a checkpoint that failed", "checkpoint_failed"),
    "dtrain_communication_errors_total": ("Failures of communication, as ranks saw them", "communication_error"),
    "dtrain_out_of_memory_total": ("Times that memory ran out", "out_of_memory"),
}


def exposition(board: JobBoard) -> bytes:
    """Return the metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector(board))
    return generate_latest(registry)


class JobCollector(Collector):
    """A collector that reads the jobs' figures at each scrape."""

    def __init__(self, board: JobBoard) -> None:
        self.board = board

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield every metric with a sample for each recent job; unknown or unreadable figures are absent."""
        jobs = self.board.recent(time.time())
        info = GaugeMetricFamily("dtrain_job_info", "A job and its state", labels=("job", "model", "state"))
        for job in jobs:
            info.add_metric((job.row.job_id, job.row.model, job.row.state), 1.0)
        yield info
        for name, (about, labels, read) in METRICS.items():
            gauge = GaugeMetricFamily(name, about, labels=("job", *labels))
            for job in jobs:
                with suppress(*UNREADABLE), job.lock:  # events that come meanwhile change what is read
                    for key, value in read(job):
                        if is_number(value):
                            gauge.add_metric((job.row.job_id, *key), float(value))
            yield gauge
        for name, (about, kind) in COUNTER_METRICS.items():
            counter = CounterMetricFamily(name, about, labels=("job",))
            for job in jobs:
                counter.add_metric((job.row.job_id,), float(job.dashboard.counts[kind]))
            yield counter
