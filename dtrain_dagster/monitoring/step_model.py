"""A measured training step as its parts, and the gain that a change of them would bring. Pure.

Which changes are worth considering is in `strategies`; what they do to the dollars of a job, in `planning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtrain_dagster.monitoring.windows import median_error, seconds_of, worlds
from trainer.documents.events import TimingEvent

WORTH_IT = 0.01
"""A gain below this counts as none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """A change of the training, with its expected gain."""

    name: str
    change: str
    """What to do, with the setting if there is one."""
    gain: float
    """Expected change of samples per second as a fraction: 0.25 is a quarter more."""
    step_seconds: float
    samples_per_second: float
    communication_share: float
    cost_gain: float
    """Expected change of samples per node-second, that is, per dollar."""
    note: str = ""
    noise: float = 0.0
    """The gain that chance alone shows in the measurements that this one is predicted from."""

    @property
    def sort_key(self) -> tuple[bool, float]:
        """The key to sort by: strategies that are faster, by how much; then those that are cheaper."""
        return (True, self.gain) if self.gain >= WORTH_IT else (False, self.cost_gain)

    @property
    def is_worth_it(self) -> bool:
        """Whether it is faster or cheaper by `WORTH_IT` at least, and by more than noise."""
        return max(self.gain, self.cost_gain) >= max(WORTH_IT, self.noise)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModel:
    """The parts of a step, in seconds, mean over ranks. A prediction is a `StepModel` as well."""

    input: float
    computing: float
    """Forward and backward computation."""
    communication: float
    waiting: float
    fixed: float
    """Update, saves and bookkeeping: the same for any number of samples."""
    samples: float
    nodes: int
    noise: float = 0.0
    """Twice the standard error of the step's seconds, as a share of them."""

    @property
    def seconds(self) -> float:
        """The seconds of a whole step."""
        return self.input + self.computing + self.communication + self.waiting + self.fixed

    @property
    def samples_per_second(self) -> float:
        """Samples per second, over all ranks."""
        return self.samples / self.seconds

    def with_work(self, factor: float) -> StepModel:
        """Return the step with ``factor`` times the work for each rank."""
        return replace(
            self, input=factor * self.input, computing=factor * self.computing, waiting=factor * self.waiting
        )

    def with_batch(self, factor: float) -> StepModel:
        """Return the step with ``factor`` times the samples, and as much more work."""
        return replace(self.with_work(factor), samples=factor * self.samples)

    def to(self, other: StepModel, name: str, change: str, note: str = "") -> Strategy:
        """Return the strategy that leads from this step to the other."""
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
            noise=self.noise,
        )


def longest_world(found: Sequence[TimingEvent]) -> list[TimingEvent]:
    """Return the windows of the world that trained longest; none where nobody counted their samples."""
    groups = worlds(found)
    return groups[0] if groups and step_model(groups[0]).samples else []


def step_model(world: Sequence[TimingEvent]) -> StepModel:
    """Return the mean step of windows of one world."""
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
        noise=2 * median_error([window.seconds for window in world]) / (seconds_of(world) / steps),
    )
