"""What the trainings of `benchmarks.scaling` show: points of weak and strong scaling, and ways to sum side by side.

Pure functions. What the points say of worlds that were not measured is in `benchmarks.scaling_model`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dtrain_dagster.monitoring.windows import typical_collectives, windows
from trainer.documents.events import StepEvent, read_events

Mode = Literal["weak", "strong"]
WARM_UP = 1
"""Logged windows of a short run that are left out: the first steps warm caches up."""
LATEST = 5
"""Number of reports over which the training loss is averaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """One short run. Seconds are medians over its logged windows, per optimizer step."""

    mode: Mode
    nodes: int
    world_size: int
    micro_batches: int
    """Micro-batches of a step, over all ranks."""
    global_batch: int
    step_seconds: float
    step_seconds_low: float
    """The fastest logged window; `step_seconds_high` is the slowest."""
    step_seconds_high: float
    compute_seconds: float
    """Forward, backward and update of a rank, mean over ranks."""
    backward_seconds: float
    network_seconds: float
    """Exposed communication; waiting for slower ranks is not in it."""
    waiting_seconds: float
    """Waiting for slower ranks, mean over ranks."""
    noise_seconds: float
    """Standard deviation of one rank's compute from step to step, as far as the windows show it."""
    all_reduces: tuple[tuple[int, float], ...]
    """(bytes, seconds on the network) of each collective of a step: buckets in order, then the commit."""
    buckets: tuple[int, ...]
    """Bytes of each gradient bucket, in the order in which they are summed; none in a world of one."""
    usd_per_epoch: float

    @property
    def samples_per_second(self) -> float:
        """Samples per second, over all ranks."""
        return self.global_batch / self.step_seconds

    @property
    def local_seconds(self) -> float:
        """All of a step that a rank does by itself: the computation, and input and bookkeeping around it."""
        return max(self.compute_seconds, self.step_seconds - self.network_seconds - self.waiting_seconds)

    @property
    def local_share_seconds(self) -> float:
        """The local work of one micro-batch."""
        return self.local_seconds * self.world_size / self.micro_batches

    @property
    def communication_to_compute(self) -> float:
        """The exposed communication as a share of the computation."""
        return self.network_seconds / self.compute_seconds if self.compute_seconds else 0.0


def read_point(
    events: Sequence[Mapping[str, Any]],
    mode: Mode,
    nodes: int,
    training: Mapping[str, Any],
    samples: int,
    usd_per_node_hour: float,
) -> ScalingPoint:
    """Return the figures of a short run. ``training``: the job's section of that name; ``samples``: the samples of an
    epoch. Raise ValueError if the run has no figures."""
    told = [item.step_seconds for item in read_events(StepEvent, events) if item.step_seconds is not None]
    seconds, timings = told[WARM_UP:], windows(events)[WARM_UP:]
    if not seconds or not timings:
        raise ValueError("the run is too short: it has logged no step after its warm-up")
    step = statistics.median(seconds)
    world = timings[0].world_size
    micro_batches = training["gradient_accumulation_steps"] * training["world_size"]
    batch = training["batch_size_per_gpu"] * micro_batches
    compute = [item.mean("forward", "backward", "optimizer") for item in timings]
    collectives = typical_collectives(timings)
    return ScalingPoint(
        mode=mode,
        nodes=nodes,
        world_size=world,
        micro_batches=micro_batches,
        global_batch=batch,
        step_seconds=step,
        step_seconds_low=min(seconds),
        step_seconds_high=max(seconds),
        compute_seconds=statistics.median(compute),
        backward_seconds=statistics.median(item.mean("backward") for item in timings),
        network_seconds=statistics.median(item.mean("communication") for item in timings),
        waiting_seconds=statistics.median(item.mean("waiting") for item in timings),
        noise_seconds=_spread(compute) * math.sqrt(timings[0].steps * world),
        all_reduces=tuple((item.bytes, item.wire_seconds) for item in collectives),
        buckets=tuple(item.bytes for item in collectives if "bucket" in item.name),
        usd_per_epoch=nodes * usd_per_node_hour / 3600 * step * math.ceil(samples / batch),
    )


def _spread(values: Sequence[float]) -> float:
    """Return the standard deviation as estimated from the median of absolute deviations: one window with a hiccup does
    not count."""
    middle = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - middle) for value in values)


def efficiency(points: Iterable[ScalingPoint], mode: Mode) -> dict[int, float]:
    """Return for each world size the samples per second per rank, as a share of those of the smallest world; 1 is
    perfect."""
    mine = sorted((point for point in points if point.mode == mode), key=lambda point: point.world_size)
    if not mine:
        return {}
    base = mine[0].samples_per_second / mine[0].world_size
    return {point.world_size: point.samples_per_second / point.world_size / base for point in mine}


def against_plain(rows: Sequence[Mapping[str, Any]], rate: str, model: str, key: str) -> dict[str, Any]:
    """Return by how much top-k is faster than allreduce, in a typical step and over the whole run. ``key`` is the
    template of the figures' names."""
    found: dict[str, Any] = {}
    for name, field in (("", "step_seconds"), ("_whole_run", "whole_run_step_seconds")):
        plain, compressed = (
            {
                row["round"]: row[field]
                for row in rows
                if (row["rate"], row["model"], row["communication"], row["hosts"]) == (rate, model, mode, 3)
            }
            for mode in ("allreduce", "topk")
        )
        ratios = [plain[turn] / compressed[turn] for turn in sorted(plain)]
        found |= {key.format(name): statistics.geometric_mean(ratios)}
        found |= {key.format(name) + "_rounds": [round_figure(ratio) for ratio in ratios]}
    return found


def round_figure(value: Any) -> Any:
    """Return a float rounded to five digits, and anything else unchanged."""
    return round(value, 5) if isinstance(value, float) else value
