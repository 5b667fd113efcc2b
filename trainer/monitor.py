"""What a node is doing: GPU by NVML, processor, memory and network by psutil, sampled in a thread (R3.1)."""

from __future__ import annotations

import threading
import time
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

    On a machine that plays several nodes, processor and memory are those of this node's own processes (its process
    group), in percent of the machine.
    """

    def __init__(self, node_id: int, reporter: Reporter, interval_seconds: float) -> None:
        self.node_id, self.reporter, self.interval_seconds = node_id, reporter, interval_seconds
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._epoch, self._step, self._samples = 0, 0, 0
        self._loss: float | None = None
        self._rate: float | None = None
        self._counted = (time.monotonic(), 0)
        self._network = (time.monotonic(), psutil.net_io_counters())
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call only sets the mark
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
        """Tell the monitor how far training is; ``samples`` is how many this node's ranks have trained on so far."""
        with self._lock:
            self._epoch, self._step, self._samples = epoch, step, samples
            self._loss = loss if loss is not None else self._loss

    def collect_gpu_metrics(self) -> GPUMetrics:
        """Utilisation, memory, temperature and power by NVML."""
        if not self._gpus:
            return GPUMetrics()
        import pynvml

        utilisation = [pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu for gpu in self._gpus]
        memory = [pynvml.nvmlDeviceGetMemoryInfo(gpu) for gpu in self._gpus]
        used, total = (sum(getattr(entry, name) for entry in memory) for name in ("used", "total"))
        warmth = [pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU) for gpu in self._gpus]
        power = [pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000 for gpu in self._gpus]
        return GPUMetrics(
            gpu_utilization=sum(utilisation) / len(utilisation),
            gpu_memory_used_bytes=float(used),
            gpu_memory_percent=100 * used / total,
            gpu_temperature_celsius=float(max(warmth)),
            gpu_power_watts=sum(power),
        )

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
        memory = self._process.memory_info().rss
        return {
            "node_id": self.node_id,
            "epoch": training.epoch,
            "step": training.step,
            "samples_per_second": training.throughput_samples_per_sec,
            "cpu_percent": self._process.cpu_percent() / (psutil.cpu_count() or 1),
            "memory_used_bytes": memory,
            "memory_percent": 100 * memory / psutil.virtual_memory().total,
            **asdict(self.collect_gpu_metrics()),
            **asdict(self.collect_network_metrics()),
        }

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
