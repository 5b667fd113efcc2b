"""The kinds of events of a run directory, each as a type with its fields, and the one way to read one from its row.

A row is what `trainer.rundir.RunDir.events` yields, whose fields `trainer.documents.schemas` has held against their
types. What may be missing there, in a file of an older version, has a default here. ``timing`` is not among them:
`dtrain_dagster.monitoring.windows` reads it.
What a reader makes of an event does not belong here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, TypeVar

_E = TypeVar("_E", bound="Event")


class EventError(ValueError):
    """A row is not of the kind that was asked for, or has not what every event of its kind has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What all events have."""

    kind: ClassVar[str]
    time: float
    """Unix seconds."""
    rank: int = 0
    generation: int = 0


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
    """Over all ranks."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipEvent(Event):
    """A generation was formed: its nodes, what changed against the one before, and how long nobody trained."""

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
    def has_parameter_server(self) -> bool:
        """Whether gradients are summed by one rank rather than by all."""
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
    """Of all processors of the machine, used by this node's ranks."""
    memory_used_bytes: int | None = None
    gpus: Sequence[Mapping[str, Any]] = ()
    """One mapping per GPU: ``memory_used_bytes``, ``memory_total_bytes`` and more."""
    gpu_utilization: float | None = None
    """Percent, mean over GPUs."""
    gpu_memory_percent: float | None = None
    gpu_power_watts: float | None = None
    """Sum over GPUs."""

    @property
    def machine(self) -> str:
        """The name of the machine that the node is on; the node's number where it did not tell."""
        return self.hostname or str(self.node_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEvent(Event):
    """A probe of the links: seconds that ``bytes`` took, as rows of (from rank, to rank, seconds)."""

    kind: ClassVar[str] = "link"
    bytes: int = 0
    seconds: Sequence[Sequence[float]] = ()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryEvent(Event):
    """Memory ran out; from here on at most ``samples`` go through the model at once."""

    kind: ClassVar[str] = "out_of_memory"
    step: int | None = None
    samples: int | None = None
    activation_checkpointing: bool = False


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


def read_event(kind: type[_E], row: Mapping[str, Any]) -> _E:
    """The event that a row holds. `EventError` where it is of another kind, or lacks what that kind has in all
    versions. Fields of a newer version are left out; a field that is None counts as missing, where it has a default."""
    if row.get("kind") != kind.kind:
        raise EventError(f"a {row.get('kind')!r} event is no {kind.kind!r} event")
    found = {}
    for name, is_needed in _names_of(kind):  # type: ignore[arg-type]  # to mypy a class has the hash of its objects
        value = row.get(name)
        if value is not None:
            found[name] = value
        elif is_needed:
            raise EventError(f"a {kind.kind!r} event without {name!r}")
    return kind(**found)


@functools.cache
def _names_of(kind: type[Event]) -> tuple[tuple[str, bool], ...]:
    return tuple((field.name, field.default is MISSING) for field in fields(kind))


def read_events(kind: type[_E], rows: Iterable[Mapping[str, Any]]) -> list[_E]:
    """The events of one kind among these rows, in their order. Rows that `read_event` refuses are left out."""
    found = []
    for row in rows:
        if row.get("kind") == kind.kind:
            try:
                found.append(read_event(kind, row))
            except EventError:
                continue
    return found
