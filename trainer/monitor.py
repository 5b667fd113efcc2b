"""What a node is doing: GPU by NVML, processor, memory and network by psutil, sampled in a thread (R3.1)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import psutil

from trainer.metrics import Reporter


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingMetrics:
    """One look at one node. What cannot be measured here is None."""

    node_id: int
    epoch: int
    step: int
    loss: float | None
    gpu_utilization: float | None
    """Percent, mean over the node's GPUs."""
    gpu_memory_used: float | None
    """Bytes, over the node's GPUs."""
    throughput_samples_per_sec: float | None
    """Of this node."""
    communication_time_ms: float | None
    timestamp: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUMetrics:
    """Over the node's GPUs; all None where there is none."""

    gpu_utilization: float | None = None
    gpu_memory_used_bytes: float | None = None
    gpu_memory_percent: float | None = None
    gpu_temperature_celsius: float | None = None
    gpu_power_watts: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkMetrics:
    """Bytes per second since the sample before, over all interfaces of the machine."""

    bytes_sent_per_second: float
    bytes_received_per_second: float


class NodeMonitor:
    """Samples one node every few seconds while training runs. On local rank 0 only: one monitor per node.

    Processor and memory are those of the node's ranks (``pids``), in percent of the machine: a machine may play several
    nodes.
    """

    def __init__(self, node_id: int, reporter: Reporter, interval_seconds: float, pids: Sequence[int]) -> None:
        self.node_id, self.reporter, self.interval_seconds = node_id, reporter, interval_seconds
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._epoch, self._step, self._samples = 0, 0, 0
        self._loss: float | None = None
        self._rate: float | None = None
        self._counted = (time.monotonic(), 0)
        self._network = (time.monotonic(), psutil.net_io_counters())
        self._processes = [psutil.Process(pid) for pid in pids]
        self._usage()  # the first call only sets the mark of the processors' time
        self._gpus = _gpu_handles()
        self._thread = threading.Thread(target=self._work, name="node-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End sampling, after one last sample."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def update(self, epoch: int, step: int, loss: float | None, samples: int) -> None:
        """Tell the monitor of a step: its loss on this rank, and how many samples this node's ranks took in it."""
        with self._lock:
            self._epoch, self._step, self._loss = epoch, step, loss
            self._samples += samples

    def collect_gpu_metrics(self) -> GPUMetrics:
        """Utilisation, memory, temperature and power by NVML."""
        if not self._gpus:
            return GPUMetrics()
        import pynvml

        utilisation = self._of_gpus(lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
        memory = self._of_gpus(pynvml.nvmlDeviceGetMemoryInfo)
        warmth = self._of_gpus(lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU))
        power = self._of_gpus(lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000)
        used, total = (sum(getattr(entry, name) for entry in memory) for name in ("used", "total"))
        return GPUMetrics(
            gpu_utilization=sum(utilisation) / len(utilisation) if utilisation else None,
            gpu_memory_used_bytes=float(used) if memory else None,
            gpu_memory_percent=100 * used / total if memory else None,
            gpu_temperature_celsius=float(max(warmth)) if warmth else None,
            gpu_power_watts=sum(power) if power else None,
        )

    def _of_gpus(self, read: Callable[[Any], Any]) -> list[Any]:
        """One value of every GPU; empty where the driver does not tell (a slice of a GPU has no temperature)."""
        import pynvml

        try:
            return [read(gpu) for gpu in self._gpus]
        except pynvml.NVMLError:
            return []

    def collect_network_metrics(self) -> NetworkMetrics:
        """Traffic since the last call."""
        before, old = self._network
        now, new = time.monotonic(), psutil.net_io_counters()
        self._network = (now, new)
        seconds = max(now - before, 1e-9)
        return NetworkMetrics(
            bytes_sent_per_second=(new.bytes_sent - old.bytes_sent) / seconds,
            bytes_received_per_second=(new.bytes_recv - old.bytes_recv) / seconds,
        )

    def collect_training_metrics(self) -> TrainingMetrics:
        """Where training stands on this node, with the throughput since the last call."""
        gpu = self.collect_gpu_metrics()
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
            communication_time_ms=None,
            timestamp=datetime.now(UTC),
        )

    def send_to_dashboard(self, metrics: dict[str, Any]) -> None:
        """Into the run directory's events, where every dashboard reads."""
        self.reporter.emit("node", **metrics)

    def sample(self) -> dict[str, Any]:
        """One ``node`` event's fields."""
        training = self.collect_training_metrics()
        cpu_percent, memory = self._usage()
        return {
            "node_id": self.node_id,
            "epoch": training.epoch,
            "step": training.step,
            "samples_per_second": training.throughput_samples_per_sec,
            "cpu_percent": cpu_percent,
            "memory_used_bytes": memory,
            "memory_percent": 100 * memory / psutil.virtual_memory().total,
            **asdict(self.collect_gpu_metrics()),
            **asdict(self.collect_network_metrics()),
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
        while not self._stop.wait(self.interval_seconds):
            self.send_to_dashboard(self.sample())
        self.send_to_dashboard(self.sample())


def _gpu_handles() -> list[Any]:
    """NVML handles of this machine's GPUs; empty where there is no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no driver, no library, no permission: all mean that there is nothing to sample
        return []
