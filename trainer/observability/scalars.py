"""The conversion of events to the curves that TensorBoard and MLflow draw: of the training, of each node, and over all
nodes; and the files in which TensorBoard finds them."""

from __future__ import annotations

import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.documents.events import TimingEvent, read_events
from trainer.storage.base import Storage

TENSORBOARD, _WITHOUT_TENSORFLOW = "tensorboard", "tensorboard.compat.notf"
UPLOAD_SECONDS, LONGEST_UPLOAD_SECONDS = 60.0, 600.0

LOGGED = "logged/"
"""What the curves of figures begin with that the training code has logged."""
TRAIN = ("loss", "learning_rate", "grad_norm", "samples_per_second", "step_seconds")
NODE = (
    "gpu_utilization", "gpu_memory_percent", "samples_per_second", "loss", "cpu_percent", "memory_percent",
    "gpu_memory_used_bytes", "gpu_temperature_celsius", "gpu_power_watts", "bytes_sent_per_second",
    "bytes_received_per_second", "disk_used_percent", "disk_read_bytes_per_second", "disk_written_bytes_per_second",
)  # fmt: skip


def mean(values: Sequence[float]) -> float:
    """Return the mean of one or more values."""
    return sum(values) / len(values)


CLUSTER: dict[str, Callable[[Sequence[float]], float]] = {
    "gpu_utilization": mean,
    "gpu_memory_percent": mean,
    "samples_per_second": sum,
    "cpu_percent": mean,
    "memory_percent": mean,
    "gpu_temperature_celsius": max,
    "gpu_power_watts": sum,
    "bytes_sent_per_second": sum,
    "bytes_received_per_second": sum,
}
"""The fields that are drawn as ``cluster/…``, and how the nodes' latest samples are combined."""


class Scalar(NamedTuple):
    """A point of a curve."""

    step: int
    name: str
    value: float
    at: float
    """Unix seconds."""


class Scalars:
    """A converter from events to scalars, which knows the current step and each node's latest sample."""

    def __init__(self) -> None:
        self.step = 0
        """The latest step that was seen."""
        self._nodes: dict[int, dict[str, Any]] = {}

    def of(self, events: Iterable[dict[str, Any]]) -> list[Scalar]:
        """Return the scalars that these events add. A field that is missing or null adds nothing."""
        rows: list[tuple[int, str, Any, float]] = []
        sampled = None
        for item in events:
            at = item["time"]
            if item["kind"] == "step":
                self.step = item["step"]
                rows += [(self.step, f"train/{name}", item.get(name), at) for name in TRAIN]
                if item.get("epoch") is not None:  # files count from 0, people from 1
                    rows.append((self.step, "train/epoch", item["epoch"] + 1, at))
            elif item["kind"] == "evaluation":
                self.step = item["step"]
                values = {"loss": item["loss"], **(item.get("metrics") or {})}
                rows += [(self.step, f"{item['split']}/{name}", value, at) for name, value in values.items()]
            elif item["kind"] == "figures":
                rows += [(item["step"], f"{LOGGED}{name}", value, at) for name, value in item["figures"].items()]
            elif item["kind"] == "node":
                self._nodes[item["node_id"]] = item
                sampled = at
                step = item.get("step", self.step)
                rows += [(step, f"node_{item['node_id']}/{name}", item.get(name), at) for name in NODE]
            elif item["kind"] == "timing":
                for timing in read_events(TimingEvent, [item]):
                    rows += [(timing.step, name, value, at) for name, value in _timing(timing)]
            elif item["kind"] == "membership":
                self._nodes = {node: sample for node, sample in self._nodes.items() if node in item["nodes"]}
        if sampled is not None:
            rows += [(self.step, f"cluster/{name}", value, sampled) for name, value in self._cluster()]
        return [Scalar(step, name, float(value), at) for step, name, value, at in rows if value is not None]

    def _cluster(self) -> Iterable[tuple[str, float]]:
        for name, merge in CLUSTER.items():
            values = [sample[name] for sample in self._nodes.values() if sample.get(name) is not None]
            if values:
                yield name, merge(values)


def _timing(timing: TimingEvent) -> Iterable[tuple[str, float]]:
    """Yield the milliseconds of each segment of a step, mean over ranks; the share of communication; and the waiting of
    each node."""
    for name, seconds in timing.segments.items():
        yield f"time/{name}_milliseconds", 1000 * mean(seconds)
    if "communication" in timing.segments:
        yield "communication/share", mean(timing.segments["communication"]) / timing.seconds
    ranks = list(zip(timing.nodes, timing.segments.get("waiting", ()), strict=False))
    for node in dict.fromkeys(node for node, _ in ranks):
        yield f"node_{node}/waiting_milliseconds", 1000 * mean([seconds for at, seconds in ranks if at == node])


class TensorBoardSink:
    """A sink that writes loss, validation, learning rate, gradient norm, utilisation and times as TensorBoard
    scalars."""

    def __init__(self, storage: Storage) -> None:
        """Write files to the folder ``tensorboard`` of a storage. TensorBoard's writer supports local files only: for
        other storage they are made on this machine, and each is copied once, when the next one begins: after
        `upload_seconds`, and at the end. TensorBoard reads them one after the other."""
        # TensorBoard's own switch: else it loads TensorFlow, where that is installed, to write a file. That takes
        # seconds, and a process that then loads triton, as torch's compiler does, crashes.
        sys.modules.setdefault(_WITHOUT_TENSORFLOW, types.ModuleType(_WITHOUT_TENSORFLOW))
        from torch.utils.tensorboard import SummaryWriter

        self._remote = None if storage.is_local else storage
        self._scratch = tempfile.TemporaryDirectory() if self._remote else None
        self._folder = self._scratch.name if self._scratch else str(storage.local_path(TENSORBOARD))
        self._writer = SummaryWriter(self._folder)
        self._scalars = Scalars()
        self._began = self._copied_at = time.monotonic()

    def write(self, events: list[dict[str, Any]]) -> None:
        """Write the scalars of these events, and begin a new file if that is due."""
        for step, name, value, at in self._scalars.of(events):
            self._writer.add_scalar(name, value, step, walltime=at)
        self._writer.flush()
        now = time.monotonic()
        if self._remote is not None and now - self._copied_at > upload_seconds(now - self._began):
            self._copy()

    def close(self) -> None:
        """Close the last file and copy it."""
        self._copy()
        if self._scratch:
            self._scratch.cleanup()

    def _copy(self) -> None:
        self._writer.close()  # what is written next begins a file
        if self._remote is not None:
            for path in Path(self._folder).iterdir():
                self._remote.write(f"{TENSORBOARD}/{path.name}", path.read_bytes())
                path.unlink()
        self._copied_at = time.monotonic()


def upload_seconds(age: float) -> float:
    """Return the seconds that a file of curves covers on remote storage, by the age of the training: a hundredth of it,
    so that a long one has hundreds of files and not thousands."""
    return min(LONGEST_UPLOAD_SECONDS, max(UPLOAD_SECONDS, age / 100))
