"""The use of a node while it trains: GPU by NVML; processor, memory, network and disk by psutil, sampled in a thread.

The figures of one process's own steps do not belong here: see `trainer.observability.comm_profiler`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import psutil

from trainer.observability.reporter import Reporter
from trainer.runtime.cores import gpu_handles
from trainer.storage.open import default_cache_dir

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingMetrics:
    """The training's figures on one node at one moment. A figure that cannot be measured is None."""

    node_id: int
    epoch: int
    step: int
    loss: float | None
    gpu_utilization: float | None
    """Percent, mean over the node's GPUs."""
    gpu_memory_used: float | None
    """Bytes, over the node's GPUs."""
    throughput_samples_per_sec: float | None
    """Samples per second of this node."""
    communication_time_ms: float | None
    """Milliseconds per step of exposed communication, without waiting for slower ranks: see
    `trainer.observability.comm_profiler`."""
    timestamp: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUMetrics:
    """Figures over the node's GPUs; all None if there is none."""

    gpu_utilization: float | None = None
    gpu_memory_used_bytes: float | None = None
    gpu_memory_percent: float | None = None
    gpu_temperature_celsius: float | None = None
    gpu_power_watts: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkMetrics:
    """Bytes per second since the previous sample, over all interfaces of the machine; None if the system does not
    tell."""

    bytes_sent_per_second: float | None = None
    bytes_received_per_second: float | None = None


class NodeMonitor:
    """A thread that samples one node every few seconds while training runs. On local rank 0 only: one monitor per node.

    Processor and memory are those of the node's ranks (``pids``), in percent of the machine, because one machine may
    play several nodes.
    """

    def __init__(self, node_id: int, reporter: Reporter, interval_seconds: float, pids: Sequence[int]) -> None:
        self.node_id, self.reporter, self.interval_seconds = node_id, reporter, interval_seconds
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._epoch, self._step, self._samples = 0, 0, 0
        self._loss: float | None = None
        self._learning_rate: float | None = None
        self._grad_norm: float | None = None
        self.communication_time_ms: float | None = None
        """Mean of the latest window of steps, in milliseconds, set by the training, which measures it."""
        self._rate: float | None = None
        self._counted = (time.monotonic(), 0)
        self._counted_at: dict[Callable[[], Any], tuple[float, Any]] = {}
        for read in (psutil.net_io_counters, psutil.disk_io_counters):
            self._rates(read)
        folders = (default_cache_dir(), *default_cache_dir().parents)
        self._folder = next(folder for folder in folders if os.path.exists(folder))  # Path.exists() may raise
        self._processes = [psutil.Process(pid) for pid in pids]
        self._usage()  # the first call only sets the mark of the processors' time
        self._gpus = gpu_handles()
        self._thread = threading.Thread(target=self._work, name="node-monitor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End sampling, after one last sample."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def update(
        self,
        epoch: int,
        step: int,
        loss: float | None,
        samples: int,
        learning_rate: float | None = None,
        grad_norm: float | None = None,
    ) -> None:
        """Tell the monitor of a step: its loss on this rank, and how many samples this node's ranks took in it."""
        with self._lock:
            self._epoch, self._step, self._loss = epoch, step, loss
            self._learning_rate, self._grad_norm = learning_rate, grad_norm
            self._samples += samples

    def collect_gpu_metrics(self) -> GPUMetrics:
        """Return utilisation, memory, temperature and power by NVML."""
        return over_gpus(self.collect_each_gpu())

    def collect_each_gpu(self) -> list[dict[str, Any]]:
        """Return the figures of every GPU of the machine; empty where there is none."""
        if not self._gpus:
            return []
        import pynvml

        found = []
        for index, gpu in enumerate(self._gpus):
            memory = _told(pynvml.nvmlDeviceGetMemoryInfo, gpu)
            power = _told(pynvml.nvmlDeviceGetPowerUsage, gpu)
            found.append(
                {
                    "index": index,
                    "utilization": getattr(_told(pynvml.nvmlDeviceGetUtilizationRates, gpu), "gpu", None),
                    "memory_used_bytes": getattr(memory, "used", None),
                    "memory_total_bytes": getattr(memory, "total", None),
                    "temperature_celsius": _told(pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU),
                    "power_watts": None if power is None else power / 1000,
                }
            )
        return found

    def collect_network_metrics(self) -> NetworkMetrics:
        """Return the traffic since the last call."""
        sent, received = self._rates(psutil.net_io_counters, "bytes_sent", "bytes_recv")
        return NetworkMetrics(bytes_sent_per_second=sent, bytes_received_per_second=received)

    def collect_disk_metrics(self) -> dict[str, float | None]:
        """Return the used share of the disk that holds the dataset's cache, and what was read and written since the
        last call over all disks of the machine."""
        used = None
        with contextlib.suppress(OSError):
            used = psutil.disk_usage(str(self._folder)).percent
        read, written = self._rates(psutil.disk_io_counters, "read_bytes", "write_bytes")
        rates = {"disk_read_bytes_per_second": read, "disk_written_bytes_per_second": written}
        return {"disk_used_percent": used, **rates}

    def _rates(self, read: Callable[[], Any], *names: str) -> list[float | None]:
        """Return each of these counters of psutil's, per second since the last call; None where the system does not
        tell."""
        try:
            new = read()
        except Exception:  # what psutil raises then depends on what is missing under /proc and /sys
            new = None
        now, (before, old) = time.monotonic(), self._counted_at.get(read, (0.0, None))
        self._counted_at[read] = (now, new)
        if old is None or new is None:
            return [None] * len(names)
        return [(getattr(new, name) - getattr(old, name)) / max(now - before, 1e-9) for name in names]

    def collect_training_metrics(self, gpu: GPUMetrics | None = None) -> TrainingMetrics:
        """Return where training stands on this node, with the throughput since the last call. ``gpu``: where it is
        known."""
        gpu = gpu or self.collect_gpu_metrics()
        with self._lock:
            epoch, step, loss, samples = self._epoch, self._step, self._loss, self._samples
        now, (before, counted) = time.monotonic(), self._counted
        if samples > counted:
            self._rate = (samples - counted) / max(now - before, 1e-9)
            self._counted = (now, samples)
        elif now - before > 2 * self.interval_seconds:
            self._rate = None  # evaluating, saving or waiting: not training
        return TrainingMetrics(
            node_id=self.node_id,
            epoch=epoch,
            step=step,
            loss=loss,
            gpu_utilization=gpu.gpu_utilization,
            gpu_memory_used=gpu.gpu_memory_used_bytes,
            throughput_samples_per_sec=self._rate,
            communication_time_ms=self.communication_time_ms,
            timestamp=datetime.now(UTC),
        )

    def send_to_dashboard(self, metrics: dict[str, Any]) -> None:
        """Write metrics to the run directory's events, which every dashboard reads."""
        self.reporter.emit("node", **metrics)

    def sample(self) -> dict[str, Any]:
        """Return the fields of one ``node`` event."""
        gpus = self.collect_each_gpu()
        over_all = over_gpus(gpus)
        training = self.collect_training_metrics(over_all)
        cpu_percent, memory = self._usage()
        with self._lock:
            learning_rate, grad_norm = self._learning_rate, self._grad_norm
        return {
            "node_id": self.node_id,
            "hostname": socket.gethostname(),
            "epoch": training.epoch,
            "step": training.step,
            "loss": training.loss,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "samples_per_second": training.throughput_samples_per_sec,
            "communication_time_ms": training.communication_time_ms,
            "cpu_percent": cpu_percent,
            "memory_used_bytes": memory,
            "memory_percent": 100 * memory / psutil.virtual_memory().total,
            "gpus": gpus,
            **asdict(over_all),
            **asdict(self.collect_network_metrics()),
            **self.collect_disk_metrics(),
        }

    def _usage(self) -> tuple[float, int]:
        """(percent of the machine's processors since the last call, resident bytes) over the node's ranks."""
        percent, memory = 0.0, 0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):  # a rank that has ended uses nothing
                percent += process.cpu_percent()
                memory += process.memory_info().rss
        return percent / (psutil.cpu_count() or 1), memory

    def _work(self) -> None:
        is_last = failed = False
        while not is_last:
            is_last = self._stop.wait(self.interval_seconds)
            try:
                self.send_to_dashboard(self.sample())
            except Exception:  # what cannot be measured now may be the next time
                if not failed:
                    _log.exception("this node could not be sampled")
                failed = True


def over_gpus(gpus: Sequence[dict[str, Any]]) -> GPUMetrics:
    """Return means and sums over the GPUs of a node that report a figure (a slice of a GPU has no temperature)."""
    utilisation, used, total, warmth, power = (
        [gpu[name] for gpu in gpus if gpu[name] is not None]
        for name in ("utilization", "memory_used_bytes", "memory_total_bytes", "temperature_celsius", "power_watts")
    )
    return GPUMetrics(
        gpu_utilization=sum(utilisation) / len(utilisation) if utilisation else None,
        gpu_memory_used_bytes=float(sum(used)) if used else None,
        gpu_memory_percent=100 * sum(used) / sum(total) if total else None,
        gpu_temperature_celsius=float(max(warmth)) if warmth else None,
        gpu_power_watts=sum(power) if power else None,
    )


def _told(read: Callable[..., Any], *arguments: Any) -> Any:
    """Return the driver's value; None if it has none."""
    import pynvml

    try:
        return read(*arguments)
    except pynvml.NVMLError:
        return None
