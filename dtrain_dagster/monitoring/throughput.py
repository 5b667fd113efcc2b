"""The throughput of a training: samples trained, divided by the seconds of the steps that trained them. Pure.

All pages and reports take it from here: that of a job, of a node, and of a rank. It is counted over windows of steps
(`timing` events); where a trainer recorded none, over its `step` events. Evaluation, saves between steps and regroups
are in neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainer.documents.events import StepEvent, TimingEvent


@dataclass(frozen=True, slots=True)
class Throughput:
    """What was trained so far; `after` adds events as they come."""

    seconds: float = 0.0
    rank_seconds: float = 0.0
    """Seconds times ranks."""
    by_node: Mapping[int, int] = field(default_factory=dict)
    """The samples of each node."""
    reported_seconds: float = 0.0
    reported_samples: float = 0.0
    """Those of `step` events, each of which stands for one step."""

    def after(self, event: TimingEvent | StepEvent) -> Throughput:
        """Return the throughput with this event."""
        if isinstance(event, StepEvent):
            if not event.step_seconds or event.samples_per_second is None:
                return self
            samples = self.reported_samples + event.samples_per_second * event.step_seconds
            return replace(self, reported_seconds=self.reported_seconds + event.step_seconds, reported_samples=samples)
        if not event.samples or len(event.samples) != event.world_size:
            return self
        by_node = dict(self.by_node)
        for node, samples in zip(event.nodes, event.samples, strict=True):
            by_node[node] = by_node.get(node, 0) + samples
        seconds = event.total_seconds
        ranks = self.rank_seconds + seconds * event.world_size
        return replace(self, seconds=self.seconds + seconds, rank_seconds=ranks, by_node=by_node)

    @property
    def samples_per_second(self) -> float | None:
        """The samples of all nodes per second; None where nothing was recorded."""
        if self.seconds:
            return sum(self.by_node.values()) / self.seconds
        return self.reported_samples / self.reported_seconds if self.reported_seconds else None

    @property
    def per_rank(self) -> float | None:
        """The samples of a rank per second, mean over ranks; None where no windows were recorded."""
        return sum(self.by_node.values()) / self.rank_seconds if self.rank_seconds else None

    def of_node(self, node: int) -> float | None:
        """Return the samples of a node per second of the whole training, so that nodes add up to all; None where no
        windows were recorded."""
        return self.by_node.get(node, 0) / self.seconds if self.seconds else None


def throughput(found: Iterable[TimingEvent], steps: Iterable[StepEvent] = ()) -> Throughput:
    """Return the throughput over these windows and steps."""
    whole = Throughput()
    for window in found:
        whole = whole.after(window)
    for step in steps:
        whole = whole.after(step)
    return whole


def samples_per_second_by_rank(world: Sequence[TimingEvent]) -> list[float] | None:
    """Return the samples per second of each rank of one world; None where they are not known."""
    seconds = sum(window.total_seconds for window in world)
    if not seconds or any(len(window.samples) != window.world_size for window in world):
        return None
    return [sum(column) / seconds for column in zip(*(window.samples for window in world), strict=True)]
