"""The collectives of one generation, on a communication thread of their own.

A blocking collective of gloo cannot be interrupted: a rank that waits for a frozen peer waits for the whole timeout. So
the communication thread waits in the collective, and the training waits for that thread, which can be interrupted:
`InterruptibleGroup.fail` gives every waiter a `GroupError` at once and leaves the thread behind.

On a GPU the communication thread submits collectives and goes on, in a stream of its own. What a thread does with a
result follows it in the order of the GPU (`trainer.comm.device_events`). Threads wait for the GPU in
`InterruptibleGroup.wait` alone, by which `run`, `fetch` and `settle` do; `InterruptibleGroup.fail` ends that wait, too.

Small sums over peer-to-peer channels (`trainer.comm.socket_group`) can be interrupted: the calling thread carries
them out itself."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trainer.comm.device_events import CudaEvents, DeviceEvents
from trainer.comm.torch_transport import Transport
from trainer.errors import ConfigError
from trainer.runtime.step_timer import traced

# Failed groups, and the time (time.monotonic) until which to keep them: a thread may still wait in one for a peer that
# never comes, and a thread that drops the last reference to such a gloo group waits for it as well.
_ABANDONED: list[tuple[InterruptibleGroup, float]] = []
AWAKE_SECONDS, POLL_SECONDS = 2e-3, 5e-5
"""For how long a thread that waits for a GPU looks without a pause, and its pauses after that."""
WAITING = "waiting for the device"
LOOK_SECONDS = 1.0
"""How often such a thread looks whether a collective has waited for its peers too long."""
REMEMBERED = 1024
"""The number of collectives whose times a group keeps."""


@dataclass(slots=True, eq=False)
class Collective:
    """One collective of this rank. Times are seconds of `time.monotonic`; None until that point is reached."""

    sequence: int
    """The number of the collective, from 1 on; the same on all ranks."""
    what: str
    bytes: int
    """The bytes of a tensor whose all-reduce would load each rank's link as much."""
    submitted: float
    began: float | None = None
    ended: float | None = None
    computing: float = 0.0
    """Seconds of this rank's own work in between, such as compression, which are not the network's."""
    events: list[Any] = field(default_factory=list)
    """On a GPU, until `InterruptibleGroup.settle`: events at its beginning, at both ends of each part of its own work,
    and at its end. Until then ``began`` and ``ended`` are when the host has submitted it and seen that it was done."""


class GroupError(RuntimeError):
    """A collective failed or was interrupted, and its group cannot be used again. ``detail`` describes the operation.

    ``communication``: whether communication failed; otherwise the group was called off for another reason.
    ``mistake``: an error that is no failure of communication and comes again, on all ranks alike: it ends the job.
    """

    def __init__(
        self,
        message: str,
        detail: dict[str, Any] | None = None,
        communication: bool = True,
        mistake: Exception | None = None,
    ) -> None:
        super().__init__(message)
        self.detail, self.communication, self.mistake = detail or {}, communication, mistake


class CollectiveResult(Protocol):
    """A collective that a group was asked for, in progress or completed."""

    def result(self) -> Any:
        """Wait for the collective and return its result. Raise `GroupError` if it failed."""
        ...

    def exception(self) -> BaseException | None:
        """Wait for the collective and return its error, None if it succeeded."""
        ...

    def done(self) -> bool:
        """Return whether `result` returns or raises at once."""
        ...


@dataclass(frozen=True, slots=True)
class CompletedCollective:
    """The result of a collective that was carried out at once."""

    value: Any = None
    error: GroupError | None = None

    def result(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value

    def exception(self) -> GroupError | None:
        """Return the error, None if there is none."""
        return self.error

    def done(self) -> bool:
        """Return True."""
        return True


class InterruptibleGroup:
    """A group of ranks with its own communication thread. ``open_transport`` is called on that thread.

    With a ``gpu``, or other ``events``, a collective begins when the device has reached the point of submission, and
    ends when its result is complete.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        open_transport: Callable[[], Transport],
        gpu: torch.device | None = None,
        events: DeviceEvents | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.events = CudaEvents(gpu) if events is None and gpu is not None else events
        """The order of work on the device; None on a CPU."""
        self.error: GroupError | None = None
        self.doing: tuple[str, float] = ("nothing", time.monotonic())
        self.collectives: deque[Collective] = deque(maxlen=REMEMBERED)
        """The latest ones, in order; the last few may be under way."""
        self._waiters: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Collective, Callable[[Transport], Any], Future[Any], Any] | None] = (
            queue.SimpleQueue()
        )
        self._open = open_transport
        self.transport: Transport | None = None
        self._current: Collective | None = None
        self._thread = threading.Thread(target=self._work, name="communication", daemon=True)
        self._thread.start()

    def submit(self, what: str, action: Callable[[Transport], Any], bytes_: int = 0) -> CollectiveResult:
        """Have the communication thread run the action, in order; the result is a `GroupError` where it fails. On a GPU
        the result may be on its way: what the thread that asks for it does with it comes after it. ``bytes_``: see
        `Collective`."""
        if self.events is None:
            return self._submit(what, action, bytes_, None)
        return _Following(self.events, self._submit(what, action, bytes_, self.events.record()))

    def _submit(self, what: str, action: Callable[[Transport], Any], bytes_: int, ready: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self.error is not None:
                future.set_exception(self.error)
                return future
            self._waiters.add(future)
            collective = self._next(what, bytes_)
            self._queue.put((collective, action, future, ready))
        return future

    def run(self, what: str, action: Callable[[Transport], Any], bytes_: int = 0) -> Any:
        """Submit the action, wait for it and return its result."""
        found = self.submit(what, action, bytes_).result()
        self.wait(what)
        return found

    def wait(self, what: str = WAITING) -> None:
        """Wait until the device has done what this thread has submitted, and the collectives whose results it has asked
        for. Raise `GroupError` if the group has failed by then: what an interrupted collective leaves is no result."""
        if self.events is not None:
            self._wait_for(self.events, self.events.record(), what)

    def fetch(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return these tensors of the device on the host, after `wait`."""
        assert self.events is not None
        found = [self.events.copy_to_host(tensor) for tensor in tensors]
        self.wait()
        return found

    def settle(self, collectives: Sequence[Collective]) -> None:
        """Let collectives that are done have the times of the device, which is waited for."""
        pending = [item for item in collectives if len(item.events) > 1]
        if self.events is None or not pending:
            return
        events, now = self.events, self.events.record()
        self._wait_for(events, now, WAITING)
        at = time.monotonic()
        for item in pending:
            began, *own, ended = (at - events.seconds_between(event, now) for event in item.events)
            item.began, item.ended = began, ended
            item.computing = sum(own[1::2]) - sum(own[::2])
            item.events.clear()

    def _wait_for(self, events: DeviceEvents, event: Any, what: str) -> None:
        """Wait until an event is done. Raise `GroupError` if the group fails first, or has failed."""
        began = looked_at = time.monotonic()
        stuck: tuple[Collective | None, float] = (None, began)
        self.doing = (what, began)
        while self.error is None:
            now = time.monotonic()
            try:
                if events.is_done(event):
                    break
                if now - looked_at > LOOK_SECONDS:
                    looked_at, stuck = now, self._time_stuck(events, stuck, now)
            except RuntimeError as error:
                self._broken(error)
                break
            time.sleep(0.0 if now - began < AWAKE_SECONDS else POLL_SECONDS)
        if self.error is not None:
            raise self.error
        now = time.monotonic()
        self.doing = ("nothing", now)
        for item in reversed(self.collectives):
            if item.ended is not None:
                break
            if len(item.events) > 1:  # complete: this thread's work follows it
                item.ended = now

    def all_reduce(self, what: str, tensor: torch.Tensor) -> CollectiveResult:
        """Sum over ranks, in place, in order with all other collectives; the result is the tensor. The sum runs at once
        on this thread if peer-to-peer channels take it and no collective is in progress, else on the communication
        thread."""
        collective = self._begin_here(what, tensor)
        if collective is None:
            return self.submit(what, partial(summed, tensor), tensor.nbytes)
        assert self.transport is not None
        try:
            with traced(f"peer-to-peer {what}"):
                self.transport.all_reduce(tensor)
        except Exception as error:  # a peer's end, or of its own
            self._broken(error)
            return CompletedCollective(error=self.error)
        collective.ended = time.monotonic()
        self.doing = ("nothing", collective.ended)
        return CompletedCollective(tensor)  # also where the group has been called off meanwhile: others have it, too

    def _time_stuck(
        self, events: DeviceEvents, before: tuple[Collective | None, float], now: float
    ) -> tuple[Collective | None, float]:
        """Return the collective that waits for peers on the device, and since when it was seen to. Fail the group where
        that is too long. What this rank computes itself may take any time."""
        pending = (item for item in self.collectives if item.ended is None and item.events)
        first = next((item for item in pending if len(item.events) < 2 or not events.is_done(item.events[-1])), None)
        if first is None or not events.is_done(first.events[0]):
            return None, now
        if first is not before[0]:
            return first, now
        patience = self.transport.linger_seconds if self.transport else 0.0
        if now - before[1] > patience:
            self.fail(f"{first.what} was not done after {now - before[1]:.0f} s")
        return before

    def _begin_here(self, what: str, tensor: torch.Tensor) -> Collective | None:
        """Return a collective to run on this thread, None if the communication thread has to run it."""
        if self.events is not None or self.transport is None or not self.transport.takes_at_once(tensor):
            return None
        with self._lock:
            if self._waiters or self.error is not None:
                return None
            collective = self._next(what, tensor.nbytes)
        collective.began = collective.submitted
        self.doing = (what, collective.began)
        return collective

    def _next(self, what: str, bytes_: int) -> Collective:
        """Return the next collective after recording it. The caller holds the lock."""
        last = self.collectives[-1].sequence if self.collectives else 0
        collective = Collective(last + 1, what, bytes_, time.monotonic())
        self.collectives.append(collective)
        return collective

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Count the time of the block, within an action, as this rank's own work (`Collective.computing`)."""
        assert self._current is not None
        if self.events is not None:
            self._current.events.append(self.events.record())
            yield
            self._current.events.append(self.events.record())
            return
        began = time.monotonic()
        yield
        self._current.computing += time.monotonic() - began

    def fail(self, message: str, communication: bool = True) -> None:
        """Fail the group, from any thread: all present and later waiters get a `GroupError`."""
        what, since = self.doing
        detail = {"operation": what, "waited_seconds": round(time.monotonic() - since, 3)}
        self._fail(GroupError(message, detail, communication))

    def close(self) -> None:
        """Close the group. After a failure the thread may be stuck; it is left behind with its resources."""
        _ABANDONED[:] = _still_waiting()
        self._queue.put(None)
        if self.error is not None and self.transport is not None:
            self.transport.abort()
        self._thread.join(0.1 if self.error is not None else 5)
        if self.error is not None or self._thread.is_alive():
            linger = self.transport.linger_seconds if self.transport else 0.0
            _ABANDONED.append((self, time.monotonic() + linger))

    def _fail(self, error: GroupError) -> None:
        with self._lock:
            if self.error is None:
                self.error = error
            waiters, self._waiters = self._waiters, set()
        if self.transport is not None:
            self.transport.interrupt()
            if self.events is not None:  # a thread may wait for the device itself, which waits for a peer
                threading.Thread(target=self.transport.abort, name="abort", daemon=True).start()
        for future in waiters:
            if not future.done():
                future.set_exception(self.error)

    def _work(self) -> None:
        self.doing = ("forming the group", time.monotonic())
        try:
            self.transport = self._open()
        except Exception as error:  # whatever it is, there is no group
            self._broken(error)
        self.doing = ("nothing", time.monotonic())
        while (item := self._queue.get()) is not None:
            collective, action, future, ready = item
            if self.error is not None or self.transport is None:
                continue  # its future has failed already
            try:
                self._current = collective
                collective.began = time.monotonic()
                self.doing = (collective.what, collective.began)
                if self.events is None:
                    result = action(self.transport)
                else:
                    self.events.follow(ready)
                    collective.events.append(self.events.record())
                    value = action(self.transport)  # NCCL's wait() only holds up the stream
                    collective.events.append(self.events.record())
                    result = value, collective.events[-1]
            except Exception as error:  # gloo and NCCL raise RuntimeError and its kin for anything
                self._broken(error)
                continue
            now = time.monotonic()
            if self.events is None:
                collective.ended = now
            self.doing = ("nothing", now)
            with self._lock:
                self._waiters.discard(future)
                failed = self.error is not None
            if not failed and not future.done():
                future.set_result(result)
        if self.error is None and self.transport is not None:
            self.transport.close()

    def _broken(self, error: Exception) -> None:
        what, since = self.doing
        waited = round(time.monotonic() - since, 3)
        text = shorten_error(error)
        detail = {"operation": what, "waited_seconds": waited, "error": text}
        # Without its traceback, whose frames would hold on to the group.
        mistake = error.with_traceback(None) if is_mistake(error) else None
        self._fail(GroupError(f"{what} failed after {waited:g} s: {text}", detail, mistake is None, mistake))


@dataclass(frozen=True, slots=True)
class _Following:
    """A collective on a device, whose result is followed by the work of the thread that asks for it."""

    events: DeviceEvents
    future: Future[Any]

    def result(self) -> Any:
        value, ended = self.future.result()
        self.events.follow(ended)
        return value

    def exception(self) -> BaseException | None:
        if (error := self.future.exception()) is None:
            self.events.follow(self.future.result()[1])
        return error

    def done(self) -> bool:
        return self.future.done()


def summed(tensor: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Sum the tensor over ranks, in place, and return it."""
    transport.all_reduce(tensor)
    return tensor


def is_communication_error(error: BaseException) -> bool:
    """Return whether gloo or NCCL raise such an error; they have exception types of their own only in part."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo/", "ProcessGroup", "NCCL"))


_MISTAKES = (ConfigError, TypeError, AssertionError, NotImplementedError)
_MISTAKEN = re.compile("Invalid scalar type|not implemented for|must match|same (size|dtype)|expected scalar type")


def is_mistake(error: BaseException) -> bool:
    """Return whether an error of a collective is none of communication: what ranks were asked to exchange cannot be."""
    is_torchs = type(error) is RuntimeError and not is_communication_error(error)
    return isinstance(error, _MISTAKES) or (is_torchs and bool(_MISTAKEN.search(str(error))))


def shorten_error(error: BaseException) -> str:
    """Return the error's text without gloo's source location and advice."""
    text = re.sub(r"^\[\S+\] ", "", str(error).strip())
    return f"{type(error).__name__}: {text.split(' This is typically')[0]}"


def has_abandoned_groups() -> bool:
    """Return whether a group that was left behind still hangs in this process, which must then exit without waiting."""
    return bool(_still_waiting())


def _still_waiting() -> list[tuple[InterruptibleGroup, float]]:
    now, waiting = time.monotonic(), list[tuple[InterruptibleGroup, float]]()
    for group, until in _ABANDONED:
        if group._thread.is_alive() or now < until:
            waiting.append((group, until))
        elif group.transport is not None:
            group.transport.close()
    return waiting
