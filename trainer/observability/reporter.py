"""The reports of a rank and the threads that write them, fed by queues, so that training never waits.

Every rank writes events; rank 0 also writes TensorBoard and MLflow. A tracking server that fails is reported once and
left alone: training goes on. How events become curves, and TensorBoard's files, belong in
`trainer.observability.scalars`, and what MLflow gets in `trainer.observability.mlflow_sink`.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainer.config import JobConfig
from trainer.rundir import EVENTS, RunDir, SeenFiles, event, event_file, flush_seconds
from trainer.runtime.launch import GivenOrder
from trainer.secrets.redaction import redact

OPENING_SECONDS = 10.0
"""The most seconds that training waits at its start for the sinks to be open: their imports take the interpreter away
from steps, and all ranks would wait for this one in each of them."""
FLUSH_SECONDS, REMOTE_FLUSH_SECONDS = 1.0, 5.0
"""The least seconds whose events share a file (`trainer.rundir.flush_seconds`), and those between two batches for
tracking; on remote storage every file costs money."""
OTHERS_SECONDS, REMOTE_OTHERS_SECONDS = 5.0, 60.0
"""The seconds between two looks at the reports of other nodes, for the curves that rank 0 draws of them."""
LOOKS_SHARE = 0.02
"""The most time that these looks may take, as a share: each lists all files of events, of which an old run has many."""
URGENT = frozenset(
    ("hang", "error", "membership", "checkpoint", "checkpoint_failed", "resume", "out_of_memory", "profile", "finish",
     "end", "communication_error")
)  # fmt: skip
"""The kinds of events that are written within `URGENT_SECONDS`, with all that came before: people wait for them, the
timeout that ends this process may be near, or a process that goes on from here does not tell it again."""
URGENT_SECONDS = 0.5
MOST_UNWRITTEN = 10_000
"""The most events that wait for their file."""
_OPEN: weakref.WeakSet[Reporter] = weakref.WeakSet()
_log = logging.getLogger(__name__)


def write_last_events(seconds: float) -> None:
    """Write the events of this process, which is about to end at once; wait at most so long for each of its
    reporters."""
    for reporter in list(_OPEN):
        reporter.write_now(seconds)


class Sink(Protocol):
    """A destination of events besides the run directory."""

    def write(self, events: list[dict[str, Any]]) -> None:
        """Write events. A sink that raises an exception is not used again."""
        ...

    def close(self) -> None:
        """Write what is left and release the sink."""
        ...


class Reporter:
    """A queue that takes events from any thread and writes them in the background, in numbered files.

    The sinks have a thread of their own: a slow tracking server delays neither training nor the events.
    """

    def __init__(self, rundir: RunDir, rank: int, generation: int, sinks: list[Callable[[], Sink]]) -> None:
        self.rundir, self.rank, self.generation = rundir, rank, generation
        self._queue: queue.SimpleQueue[dict[str, Any] | threading.Event | None] = queue.SimpleQueue()
        self._asking: list[threading.Event] = []
        self._numbers: dict[tuple[int, int], int] = {}
        self._known = SeenFiles()
        """Files of events that need not be read for the reports of others; kept if there are sinks."""
        self.has_other_nodes = True
        """Whether there may be other nodes whose samples are to be drawn."""
        self._tracking: queue.SimpleQueue[list[dict[str, Any]] | None] = queue.SimpleQueue()
        self._began = self._written_at = time.monotonic()
        self._is_urgent = False
        self._opened = threading.Event()
        self._threads = [threading.Thread(target=self._work, name="reporter", daemon=True)]
        self._threads[0].start()
        self._open(sinks)
        _OPEN.add(self)

    def move(self, rank: int, generation: int, sinks: list[Callable[[], Sink]]) -> None:
        """Report as this rank of this generation from now on, and to these sinks as well, unless there are sinks
        already."""
        self.rank, self.generation = rank, generation
        self._open(sinks)

    def _open(self, sinks: list[Callable[[], Sink]]) -> None:
        if sinks and len(self._threads) == 1:
            self._threads.append(threading.Thread(target=self._track, args=(sinks,), name="tracking", daemon=True))
            self._threads[1].start()

    def wait_until_open(self, seconds: float) -> bool:
        """Wait until the sinks are open or have failed; return False if that takes longer than ``seconds``."""
        return len(self._threads) == 1 or self._opened.wait(seconds)

    def emit(self, kind: str, **fields: Any) -> None:
        """Queue an event and return at once. A number that is not finite is written as null."""
        self._queue.put(event(kind, self.rank, self.generation, **finite(fields)))

    def write_now(self, seconds: float) -> None:
        """Write what was emitted so far, and wait at most so long for it. Any thread may call this."""
        written = threading.Event()
        self._queue.put(written)
        written.wait(seconds)

    def close(self, tracking_seconds: float = 60.0) -> None:
        """Write what is left, and wait at most ``tracking_seconds`` for the sinks."""
        self._queue.put(None)
        for thread in self._threads:
            thread.join(tracking_seconds if thread.name == "tracking" else None)
            if thread.is_alive():
                self._failed(f"tracking did not finish within {tracking_seconds:g} s; its last values are lost")
        _OPEN.discard(self)
        self._queue.put(None)  # what the sinks had to say at the end
        left, _ = self._next_batch()
        if left:
            self._write(left)

    def _work(self) -> None:
        closing, unwritten = False, list[dict[str, Any]]()
        while not closing:
            batch, closing = self._next_batch()
            if batch and len(self._threads) > 1:
                self._tracking.put(batch)
            unwritten += batch
            if unwritten and (closing or self._is_due(len(unwritten))):
                unwritten = self._write(unwritten)[-MOST_UNWRITTEN:]
                self._written_at, self._is_urgent = time.monotonic(), False
            while self._asking:
                self._asking.pop().set()
        self._tracking.put(None)

    def _is_due(self, count: int) -> bool:
        """Return whether so many events are written now."""
        now = time.monotonic()
        waits = flush_seconds(now - self._began, self.rank, self.rundir.storage.is_local)
        return self._is_urgent or count >= MOST_UNWRITTEN or now - self._written_at >= waits

    def _next_batch(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the events of the next second or seconds, and whether they are the last."""
        batch: list[dict[str, Any]] = []
        deadline = time.monotonic() + (FLUSH_SECONDS if self.rundir.storage.is_local else REMOTE_FLUSH_SECONDS)
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                item = self._queue.get(timeout=remaining)
            except queue.Empty:
                break
            if item is None:
                return batch, True
            if isinstance(item, threading.Event):
                self._asking.append(item)
                self._is_urgent = True
                break
            batch.append(item)
            if item["kind"] in URGENT:
                self._is_urgent = True
                deadline = min(deadline, time.monotonic() + URGENT_SECONDS * (item["kind"] != "hang"))
        return batch, False

    def _write(self, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Write events, and return those that storage did not take, for the next time."""
        places, left = dict.fromkeys((item["generation"], item["rank"]) for item in batch), list[dict[str, Any]]()
        for place in places:
            mine = [item for item in batch if (item["generation"], item["rank"]) == place]
            left += [] if self._append(place, mine) else mine
        return left

    def _append(self, place: tuple[int, int], events: list[dict[str, Any]]) -> bool:
        """Write the next file of a rank in a generation; return False where storage fails."""
        while True:
            number = self._numbers[place] = self._numbers.get(place, 0) + 1
            if len(self._threads) > 1:
                self._known.add([event_file(*place, number)])
            try:
                self.rundir.append_events(*place, number, events)
                return True
            except FileExistsError:  # of an earlier start that was given the same generation
                continue
            except (OSError, ValueError, TypeError) as error:
                self._numbers[place] -= 1  # the next file has this number: none is missing
                _log.error("could not write %d events: %s", len(events), error)
                return not isinstance(error, OSError)

    def _track(self, factories: list[Callable[[], Sink]]) -> None:
        # Before the sinks are opened, which takes seconds; what others report meanwhile is drawn.
        self._known.add(self._try("read the events for", lambda: self.rundir.storage.list(EVENTS)) or ())
        sinks = [sink for factory in factories if (sink := self._try("open", factory))]
        self._opened.set()
        seconds = OTHERS_SECONDS if self.rundir.storage.is_local else REMOTE_OTHERS_SECONDS
        look_at = time.monotonic() + seconds
        while (batch := self._wait_for_batch(seconds)) is not None:
            is_last = any(item["kind"] == "end" for item in batch)  # a sink may take nothing after it
            began = time.monotonic()
            # At the end of all, remote storage may take longer than there is time, and the end itself comes first.
            is_due = self.rundir.storage.is_local if is_last else began > look_at
            if sinks and self.has_other_nodes and is_due:
                batch = self._samples_of_others() + batch
                ended = time.monotonic()
                look_at = ended + max(seconds, (ended - began) / LOOKS_SHARE)
            for sink in list(sinks) if batch else []:
                if not self._try("write to", functools.partial(_write_to, sink, batch)):
                    sinks.remove(sink)
        for sink in sinks:
            self._try("close", sink.close)

    def _wait_for_batch(self, seconds: float) -> list[dict[str, Any]] | None:
        """Return what this rank reports next, an empty list after ``seconds``, None at the end."""
        try:
            return self._tracking.get(timeout=seconds)
        except queue.Empty:
            return []

    def _samples_of_others(self) -> list[dict[str, Any]]:
        """New samples of nodes whose events other processes write."""
        try:
            return [item for item in self.rundir.follow(self._known) if item["kind"] == "node"]
        except Exception as error:  # storage, or an event that is none
            _log.warning("what other nodes report cannot be read: %s", error)
            return []

    def _try(self, what: str, action: Callable[[], Any]) -> Any | None:
        try:
            return action()
        except Exception as error:  # whatever a tracking server does must not stop a training
            reason = f"{type(error).__name__}: {redact(str(error))}"
            self._failed(f"could not {what} a tracking sink: {reason}; training goes on without it")
            return None

    def _failed(self, message: str) -> None:
        _log.warning(message)
        self.emit("error", message=message, fatal=False)


def _write_to(sink: Sink, batch: list[dict[str, Any]]) -> bool:
    sink.write(batch)
    return True


def finite(value: Any) -> Any:
    """Return the value with None for numbers that are not finite, which JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(slots=True)
class StepWindow:
    """The sums of this rank over the steps since the last report, and the time that they took without pauses."""

    began: float = field(default_factory=time.monotonic)
    steps: int = 0
    loss_sum: float = 0.0
    weight: float = 0.0
    """What the samples weigh in the mean of their losses."""
    samples: int = 0

    def add(self, loss_sum: float, samples: int, weight: float | None = None) -> None:
        """Count a step; ``weight`` is the number of samples where it is not given."""
        self.steps += 1
        self.loss_sum += loss_sum
        self.weight += samples if weight is None else weight
        self.samples += samples


def sinks_of(job: JobConfig, rundir: RunDir, rank: int) -> list[Callable[[], Sink]]:
    """Return what opens the sinks that rank 0 writes to besides the run directory; nothing on other ranks. The imports
    are left to the thread that opens them."""

    def open_tensorboard() -> Sink:
        from trainer.observability.scalars import TensorBoardSink

        return TensorBoardSink(rundir.storage)

    def open_mlflow() -> Sink:
        from trainer.observability.mlflow_sink import MLflowSink

        return MLflowSink(job, rundir)

    factories: list[Callable[[], Sink]] = []
    if rank == 0 and job.tracking.tensorboard:
        factories.append(open_tensorboard)
    if rank == 0 and job.tracking.mlflow_tracking_uri and GivenOrder.read(os.environ).is_tracked:
        factories.append(open_mlflow)
    return factories
