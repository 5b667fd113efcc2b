"""The kinds of events of a run directory, each as a type with its fields, and the one way to read one from its row.

A row is what `trainer.rundir.RunDir.events` yields: `trainer.documents.reader` leaves out what its class does not take.
What may be missing there, in a file of an older version, has a default here. What a reader makes of an event does not
belong here.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Self, TypeVar

from trainer.documents.schemas import LEAVING, NO_COLLECTIVE, make, many, number_between, record_of

_E = TypeVar("_E", bound="Event")
_each = many(number_between())


def _link(value: Any) -> str:
    """Check for three numbers."""
    return _each(value) or ("" if len(value) == 3 else "not three numbers")


class EventError(ValueError):
    """A row is not of the kind that was asked for, or has not what every event of its kind has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event: the fields that all kinds have."""

    kind: ClassVar[str]
    time: float
    """Unix seconds."""
    rank: int = 0
    generation: int = 0

    def settled(self, row: Mapping[str, Any]) -> Self:
        """Return the event as it is used. Raise `EventError` where its figures do not fit together."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEvent(Event):
    """Something that a rank does outside its steps has ended; ``seconds`` are a running sum by ``name``."""

    kind: ClassVar[str] = "phase"
    name: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent(Event):
    """Rank 0 tells of the steps since the one that it told of before; figures are means over them."""

    kind: ClassVar[str] = "step"
    step: int
    epoch: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    samples_per_second: float | None = None
    """Samples per second over all ranks."""
    step_seconds: float | None = None
    eta_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEvent(Event):
    """The model was evaluated on a split; ``seconds``: what that took."""

    kind: ClassVar[str] = "evaluation"
    split: str
    step: int | None = None
    loss: float | None = None
    seconds: float | None = None
    metrics: Mapping[str, float | None] | None = None
    """What a task measures besides its loss, such as ``accuracy``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FiguresEvent(Event):
    """The training code has logged figures of its own, by name."""

    kind: ClassVar[str] = "figures"
    step: int
    figures: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishEvent(Event):
    """A stage of the finish begins (`FinishStage`): what follows a training's last step."""

    kind: ClassVar[str] = "finish"
    stage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipEvent(Event):
    """A generation was formed: its nodes, what changed against the one before, and how long no rank trained."""

    kind: ClassVar[str] = "membership"
    nodes: Sequence[int]
    joined: Sequence[int] = ()
    lost: Sequence[int] = ()
    world_size: int | None = None
    """Ranks."""
    topology: str = "mesh"
    reason: str = ""
    step: int | None = None
    seconds: float = 0.0

    @property
    def was_asked(self) -> bool:
        """Return whether its lost nodes left because they were asked to."""
        return self.reason == LEAVING

    @property
    def has_parameter_server(self) -> bool:
        """Return whether gradients are summed by one rank rather than by all."""
        return self.topology == "star"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent(Event):
    """A node's own figures at one moment, of those that its machine can measure."""

    kind: ClassVar[str] = "node"
    node_id: int
    hostname: str | None = None
    """Several nodes of a local cluster share one."""
    samples_per_second: float | None = None
    cpu_percent: float | None = None
    """The share of all processors of the machine that this node's ranks use."""
    memory_used_bytes: float | None = None
    gpus: Sequence[Mapping[str, Any]] = ()
    """One mapping per GPU: ``memory_used_bytes``, ``memory_total_bytes`` and more."""
    gpu_utilization: float | None = None
    """Percent, mean over GPUs."""
    gpu_memory_percent: float | None = None
    gpu_power_watts: float | None = None
    """Sum over GPUs."""

    @property
    def machine(self) -> str:
        """The name of the machine that the node is on; the node's number if it is not known."""
        return self.hostname or str(self.node_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEvent(Event):
    """A probe of the links: seconds that ``bytes`` took, as rows of (from rank, to rank, seconds)."""

    kind: ClassVar[str] = "link"
    bytes: int = 0
    seconds: Sequence[Annotated[Sequence[float], _link]] = ()
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvent(Event):
    """A checkpoint counts from now on. ``seconds``: what its writing took; ``stall_seconds``: what training waited."""

    kind: ClassVar[str] = "checkpoint"
    step: int | None = None
    path: str = ""
    seconds: float = 0.0
    stall_seconds: float | None = None
    is_best: bool = False

    @property
    def began_at(self) -> float:
        """Unix seconds when its writing began."""
        return self.time - self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailedEvent(Event):
    """An attempt to write a checkpoint failed."""

    kind: ClassVar[str] = "checkpoint_failed"
    message: str
    step: int | None = None
    attempt: int = 1
    gives_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeEvent(Event):
    """Training goes on from a checkpoint."""

    kind: ClassVar[str] = "resume"
    path: str
    step: int
    changes: Sequence[str] = ()
    """What is otherwise than before, in words: settings, and what the scores depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangEvent(Event):
    """A rank has made no progress for long: where it stands, and in which collective, if in any."""

    kind: ClassVar[str] = "hang"
    rank: int
    generation: int
    step: int
    node_id: int | None = None
    nodes: Sequence[int] = ()
    """The node of each rank."""
    waited_seconds: float = 0.0
    operation: str = NO_COLLECTIVE
    """The collective that it waits in, with size and owner; `NO_COLLECTIVE` if it does something else."""
    sequence: int = 0
    """The number of the newest collective that it has entered, which is the same on all ranks."""
    where: str = "an unknown place"
    """The line of code that it is in."""
    recent: Sequence[Mapping[str, Any]] = ()
    """Its latest collectives: ``sequence``, ``what``, ``ended``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileEvent(Event):
    """A rank has written a trace of its last ``steps`` steps."""

    kind: ClassVar[str] = "profile"
    step: int
    steps: int
    path: str
    """The trace, in the run directory."""
    top: Sequence[Mapping[str, Any]] = ()
    """The operations that took most: ``name``, ``self_seconds``, ``share``, ``calls``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneEvent(Event):
    """Tuning has tried or decided something."""

    kind: ClassVar[str] = "tune"
    elapsed_seconds: float
    budget_seconds: float
    group: str = ""
    candidate: str = ""
    doing: str = ""
    samples_per_second: Mapping[str, float] | None = None
    """The interval of what was measured: ``low``, ``median``, ``high``."""
    gain: Mapping[str, float] | None = None
    """The same, as a ratio to what it is compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryEvent(Event):
    """Memory ran out; from here on at most ``samples`` go through the model at once."""

    kind: ClassVar[str] = "out_of_memory"
    step: int | None = None
    samples: int | None = None
    activation_checkpointing: bool = False
    device: str | None = None
    """``cpu`` where the training left its GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorEvent(Event):
    """Something failed; ``fatal``: the job ends of it."""

    kind: ClassVar[str] = "error"
    message: str
    fatal: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEvent(Event):
    """A rank has ended."""

    kind: ClassVar[str] = "end"
    status: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveTiming:
    """A collective of a step, by name: means over the steps of a window, or medians over windows."""

    name: str = ""
    bytes: int = 0
    wire_seconds: float = 0.0
    """Its time on the network, without waiting."""
    waiting_seconds: tuple[float, ...] = ()
    """The seconds that each rank waits for the last one."""
    overlapped_seconds: tuple[float, ...] = ()
    """The seconds of each rank that the backward pass hid."""
    bandwidth_bytes_per_second: float | None = None

    @property
    def overlap(self) -> float:
        """Share of its own duration that the backward pass hid, mean over ranks."""
        own = self.wire_seconds * max(1, len(self.overlapped_seconds)) + sum(self.waiting_seconds)
        return min(1.0, sum(self.overlapped_seconds) / own) if own > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingEvent(Event):
    """The work of the ranks of one world in a window of consecutive steps; ``time``: when it ended. Seconds are means
    per step, one for each rank."""

    kind: ClassVar[str] = "timing"
    step: int = 0
    steps: int
    seconds: float = 0.0
    """Seconds of one step, mean over ranks: the sum of the segments."""
    nodes: tuple[int, ...]
    """The node of each rank."""
    samples: tuple[int, ...] = ()
    segments: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    typical: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Medians over the window's steps: ``input``, ``compute`` (forward, backward, optimizer), ``late``."""
    machines: tuple[int, ...] = ()
    """The machine of each rank, numbered from 0; empty: not known."""
    cores: tuple[int, ...] = ()
    """The cores that each rank may use; empty: not known."""
    collectives: tuple[CollectiveTiming, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """``topology``, ``backend``, ``device``, ``micro_batches``, ``local_samples_per_micro_batch``…"""

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.nodes)

    @property
    def total_seconds(self) -> float:
        """Seconds of the whole window."""
        return self.seconds * self.steps

    def mean(self, *segments: str) -> float:
        """Return seconds per step of these segments together, mean over ranks; 0 for a segment that was not
        measured."""
        rows = (self.segments.get(name) for name in segments)
        return sum((statistics.fmean(values) for values in rows if values), 0.0)

    def settled(self, row: Mapping[str, Any]) -> Self:
        """Return the event without the figures that are not one for each rank. Raise `EventError` for one without
        ranks, steps or seconds."""
        size = len(self.nodes)
        segments, typical = (
            {name: tuple(values) for name, values in rows.items() if len(values) == size}
            for rows in (self.segments, self.typical)
        )
        # What the segments of the ranks sum to, so that shares add up; the wall clock where there are none.
        sums = [sum(values) for values in zip(*segments.values(), strict=True)]
        seconds = statistics.fmean(sums) if sums else self.seconds
        if not size or not seconds > 0 or not self.steps:
            raise EventError("a 'timing' event without ranks, steps or seconds")
        return replace(
            self,
            seconds=seconds,
            segments=segments,
            typical=typical,
            machines=self.machines if len(self.machines) == size else (),
            cores=self.cores if len(self.cores) == size else (),
            facts={name: value for name, value in row.items() if isinstance(value, int | float | str)},
        )


def read_event(kind: type[_E], row: Mapping[str, Any]) -> _E:
    """Return the event that a row holds. Raise `EventError` if it is of another kind, or lacks a field that this kind
    has in all versions. Fields of a newer version are left out; a field that is None counts as missing if it has a
    default."""
    if row.get("kind") != kind.kind:
        raise EventError(f"a {row.get('kind')!r} event is no {kind.kind!r} event")
    given = {name: value for name, value in row.items() if value is not None}
    if wrong := record_of(kind)(given):  # type: ignore[arg-type]  # a class has its own hash
        raise EventError(f"a damaged {kind.kind!r} event: it is {wrong}")
    return make(kind, given).settled(given)


def read_events(kind: type[_E], rows: Iterable[Mapping[str, Any]]) -> list[_E]:
    """Return the events of one kind among these rows, in their order. Rows that `read_event` refuses are left out."""
    found = []
    for row in rows:
        if row.get("kind") == kind.kind:
            try:
                found.append(read_event(kind, row))
            except EventError:
                continue
    return found


KINDS = {kind.kind: kind for kind in Event.__subclasses__()}
"""The kinds of events by their names."""
