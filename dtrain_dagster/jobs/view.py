"""How a job goes: one `JobView`, folded from its events, for assets, command line, probe, fleet and pages.

`fold` is pure. `JobFollower` reads what was written since its last look, and keeps the view. What a page draws besides,
series of points, is `dtrain_dagster.dashboard.series`; what paid time was spent on, `dtrain_dagster.costs.timeline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from dtrain_dagster.monitoring.hangs import hang_verdict, unresolved
from dtrain_dagster.monitoring.windows import LATEST_WINDOWS, TELLING, keep, settled, shares, windows
from trainer.documents import events
from trainer.printable import visible
from trainer.rundir import RunDir, SeenFiles
from trainer.secrets.redaction import redact

STAGES = {
    "test split": "evaluating the test split",
    "baselines": "fitting the baselines",
    "report": "writing the report",
    "model": "writing the model",
}
"""The words for the stages of the finish (`trainer.documents.schemas.FinishStage`)."""
DOING = {"data": "loading the model", "startup": "starting", "finalise": "judged and written"}
"""What a job does once a phase is done: events tell what has been done, and a person waits for what comes now."""
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)
"""Errors that an event raises which was written to another contract."""
RESUMED = "resumed from"
"""The first words of the news that a job has resumed, of which its cluster tells people."""
KEPT_REPORTS, KEPT_PAUSES = 20, 5


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """How a job goes. Fields are None until they are known."""

    phase: str = "waiting for nodes"
    step: int = 0
    epoch: int = 0
    """The epoch of that step, counted from 1 as people do; 0 while none is known. Files count from 0."""
    loss: float | None = None
    valid_loss: float | None = None
    samples_per_second: float | None = None
    total_steps: int | None = None
    """All steps of the training, as it says itself."""
    reports: tuple[tuple[float, float, int], ...] = ()
    """(when, seconds per step, step) of the latest ``step`` events."""
    evaluation_seconds: tuple[float, ...] = ()
    checkpoint_seconds: tuple[float, ...] = ()
    """Seconds for which each save has held up training."""
    paused_seconds: float = 0.0
    """Seconds of all evaluations and saves so far."""
    finish_began: float | None = None
    """Unix time at which the finish began; None while it trains."""
    nodes_alive: int = 0
    news: tuple[str, ...] = ()
    """Sentences on events since the last look that a person should know: nodes lost and found, saves that failed."""
    recent: tuple[Mapping[str, Any], ...] = ()
    """The latest events that tell what slows the steps, see `monitoring.alerts`."""
    hang: tuple[Mapping[str, Any], ...] = ()
    """Reports of ranks that see no progress, until there is some."""

    def shares(self) -> dict[str, float]:
        """Return the share of each segment in the latest steps; empty while not known."""
        return shares(settled(windows(self.recent))[-LATEST_WINDOWS:])

    def explained(self, message: str) -> str:
        """Return the message, with the rank that kept the others waiting, if that is the cause."""
        return f"{message}; {hang_verdict(self.hang)}" if self.hang else message


def fold(view: JobView, found: Sequence[Mapping[str, Any]]) -> JobView:
    """Return the view after these events, in order of time. One of another contract is left out. Pure."""
    if any(item.get("kind") in TELLING for item in found):
        view = replace(view, recent=keep(view.recent, found))
    with suppress(*UNREADABLE):
        view = replace(view, hang=unresolved(view.hang, found))
    for item in found:
        with suppress(*UNREADABLE):
            view = _after(view, item)
    return view


def _after(view: JobView, item: Mapping[str, Any]) -> JobView:
    """Return the view after one event; raise one of `UNREADABLE` where it was written to another contract."""
    kind = item["kind"]
    if kind == "phase":
        is_new = item["rank"] == 0 and item["name"] in DOING and (not view.step or item["name"] == "finalise")
        return replace(view, phase=DOING[item["name"]]) if is_new else view
    if kind == events.StepEvent.kind:
        return _after_step(view, events.read_event(events.StepEvent, item))
    if kind == events.FinishEvent.kind:
        told = events.read_event(events.FinishEvent, item)
        is_first = view.finish_began is None or told.stage == "test split"  # a second time, after a node was lost
        began = float(told.time) if is_first else view.finish_began
        return replace(view, phase=STAGES.get(told.stage, "finishing"), finish_began=began)
    if kind == events.EvaluationEvent.kind:
        judged = events.read_event(events.EvaluationEvent, item)
        if judged.split != "valid":
            return view
        view = replace(view, valid_loss=judged.loss)
        if not _is_positive(judged.seconds):
            return view
        took = (*view.evaluation_seconds, float(judged.seconds))[-KEPT_PAUSES:]
        return replace(view, evaluation_seconds=took, paused_seconds=view.paused_seconds + took[-1])
    if kind == events.CheckpointEvent.kind:
        save = events.read_event(events.CheckpointEvent, item)
        if not _is_positive(save.stall_seconds):
            return view
        took = (*view.checkpoint_seconds, float(save.stall_seconds))[-KEPT_PAUSES:]
        return replace(view, checkpoint_seconds=took, paused_seconds=view.paused_seconds + took[-1])
    return view


def _after_step(view: JobView, told: events.StepEvent) -> JobView:
    view = replace(
        view,
        phase="training",
        step=told.step,
        epoch=0 if told.epoch is None else told.epoch + 1,
        loss=None if told.loss is None else float(told.loss),
        samples_per_second=told.samples_per_second,
    )
    if not _is_positive(told.step_seconds):
        return view
    report = float(told.time), float(told.step_seconds), told.step
    total, began = view.total_steps, view.finish_began
    if told.eta_seconds is not None and 0 <= told.eta_seconds < float("inf"):
        total = told.step + round(told.eta_seconds / told.step_seconds)
    if began is not None and report[0] > began:
        began = None  # of a launch that was lost: another one trains again
    return replace(view, reports=(*view.reports, report)[-KEPT_REPORTS:], total_steps=total, finish_began=began)


def _is_positive(value: float | None) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


class JobFollower:
    """Reads a job's events as they are written. ``view`` is the job as far as they were read."""

    def __init__(self, rundir: RunDir, view: JobView | None = None) -> None:
        self.rundir, self.view = rundir, view or JobView()
        self._seen = SeenFiles()

    def read(self, is_live: bool = False) -> Iterator[list[dict[str, Any]]]:
        """Read what has come since, and yield the events, a part at a time. ``is_live``: see `RunDir.follow`."""
        for found in self.rundir.looks(self._seen, is_live):
            self.view = fold(self.view, found)
            yield found


def news(told: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return one sentence for each unusual event, to be printed as it is, without secrets. Pure."""
    found = []
    for item in told:
        with suppress(*UNREADABLE):
            found.append(visible(redact(_sentence(item))))
    return tuple(dict.fromkeys(filter(None, found)))


def _sentence(item: Mapping[str, Any]) -> str:
    """Return a sentence on an unusual event, "" for a usual one; raise one of `UNREADABLE` as `_after` does."""
    kind = item["kind"]
    if kind == "membership":
        formed = events.read_event(events.MembershipEvent, item)
        if formed.generation <= 1 or formed.world_size is None:
            return ""
        went = "node(s) {} left when asked to" if formed.was_asked else "lost node(s) {}"
        change = [went.format(_listed(formed.lost))] if formed.lost else []
        change += [f"took in node(s) {_listed(formed.joined)}"] if formed.joined else []
        mode = ", in parameter-server mode" if formed.has_parameter_server else ""
        return (
            f"generation {formed.generation} at step {formed.step}: {' and '.join(change) or 'the same nodes'}; "
            f"goes on with {formed.world_size} rank(s){mode} after {formed.seconds:.2f} s ({formed.reason})"
        )
    if kind == "out_of_memory":
        short = events.read_event(events.OutOfMemoryEvent, item)
        if short.device == "cpu":
            return f"out of memory at step {short.step}: rank {short.rank}'s GPU is too small, it continues on the CPU"
        more = " and activation checkpointing" if short.activation_checkpointing else ""
        return f"out of memory at step {short.step}: goes on with {short.samples} samples at once{more}"
    if kind == "checkpoint_failed":
        failed = events.read_event(events.CheckpointFailedEvent, item)
        end = "given up; training goes on" if failed.gives_up else "will be tried again"
        return f"the checkpoint of step {failed.step} could not be saved ({failed.message}): {end}"
    if kind == "resume":
        resumed = events.read_event(events.ResumeEvent, item)
        return "; ".join([f"{RESUMED} {resumed.path} at step {resumed.step}", *resumed.changes])
    if kind == "error":
        error = events.read_event(events.ErrorEvent, item)
        return "" if error.fatal else error.message
    return ""


def _listed(nodes: Sequence[int]) -> str:
    return ", ".join(map(str, nodes))


def last_step(rundir: RunDir) -> tuple[int, float] | None:
    """Return the last step that a training reported, and its loss; the newest events are read first."""
    for found in rundir.newest_events():
        for event in reversed(found):
            if event["kind"] == "step":
                with suppress(events.EventError):
                    told = events.read_event(events.StepEvent, event)
                    if told.loss is not None:
                        return told.step, told.loss
    return None
