"""A training step as its parts, measured, and what a change of them would gain. Pure.

Which changes are worth considering is in `strategies`; what they do to the dollars of a job, in `planning`. How a step
grows with the number of ranks, from measurements at several sizes, is in `scaling`. What the backward pass hides of its
communication is `trainer.performance.step`'s, for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.documents.events import TimingEvent

WORTH_IT = 0.01
"""A gain below this is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    name: str
    change: str
    """What to do, with the setting where there is one."""
    gain: float
    """Expected change of samples per second as a fraction: 0.25 is a quarter more."""
    step_seconds: float
    samples_per_second: float
    communication_share: float
    cost_gain: float
    """Expected change of samples per node-second, that is, per dollar."""
    note: str = ""

    @property
    def order(self) -> tuple[bool, float]:
        """To sort by: whatever is faster, by how much; then whatever is cheaper."""
        return (True, self.gain) if self.gain >= WORTH_IT else (False, self.cost_gain)

    @property
    def is_worth_it(self) -> bool:
        return max(self.gain, self.cost_gain) >= WORTH_IT


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModel:
    """A step as its parts, in seconds, mean over ranks. What it predicts is another one of these."""

    input: float
    computing: float
    """Forward and backward."""
    communication: float
    waiting: float
    fixed: float
    """Update, saves and bookkeeping: the same however many samples there are."""
    samples: float
    nodes: int

    @property
    def seconds(self) -> float:
        return self.input + self.computing + self.communication + self.waiting + self.fixed

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    def with_work(self, factor: float) -> StepModel:
        """So many times the work for each rank in every step."""
        return replace(
            self, input=factor * self.input, computing=factor * self.computing, waiting=factor * self.waiting
        )

    def with_batch(self, factor: float) -> StepModel:
        """So many times the samples, and as much more work, in every step."""
        return replace(self.with_work(factor), samples=factor * self.samples)

    def to(self, other: StepModel, name: str, change: str, note: str = "") -> Strategy:
        """The strategy that leads from this step to the other."""
        gain = other.samples_per_second / self.samples_per_second
        return Strategy(
            name=name,
            change=change,
            gain=gain - 1,
            step_seconds=other.seconds,
            samples_per_second=other.samples_per_second,
            communication_share=other.communication / other.seconds,
            cost_gain=gain * self.nodes / other.nodes - 1,
            note=note,
        )


def step_model(world: Sequence[TimingEvent]) -> StepModel:
    """The mean step of windows of one world."""
    steps = sum(window.steps for window in world)

    def mean(*segments: str) -> float:
        return sum(window.mean(segment) * window.steps for window in world for segment in segments) / steps

    return StepModel(
        input=mean("input"),
        computing=mean("forward", "backward"),
        communication=mean("communication"),
        waiting=mean("waiting"),
        fixed=mean("optimizer", "checkpoint", "other"),
        samples=sum(sum(window.samples) for window in world) / steps,
        nodes=len(set(world[-1].nodes)),
    )
