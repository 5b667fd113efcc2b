"""The collectives of one generation, on a communication thread of their own.

A blocking collective of gloo cannot be interrupted: a rank that waits for a frozen peer waits for the whole timeout. So
the communication thread waits in the collective, and the training waits for that thread, which can be interrupted:
`InterruptibleGroup.fail` gives every waiter a `GroupError` at once and leaves the thread behind.

Small sums over peer-to-peer channels (`trainer.comm.socket_group`) can be interrupted: the calling thread carries
them out itself."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trainer.comm.torch_transport import Transport
from trainer.errors import ConfigError
from trainer.runtime.step_timer import traced

# Failed groups, and the time (time.monotonic) until which to keep them: a thread may still wait in one for a peer that
# never comes, and a thread that drops the last reference to such a gloo group waits for it as well.
_ABANDONED: list[tuple[InterruptibleGroup, float]] = []
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


class InterruptibleGroup:
    """A group of ranks with its own communication thread. ``open_transport`` is called on that thread.

    With a ``gpu``, a collective begins when the GPU has reached the point of submission, and ends when its result is
    complete. The communication thread waits for both; otherwise the times would only cover the submission. (That has
    not been run on a GPU yet.)
    """

    def __init__(
        self, rank: int, size: int, open_transport: Callable[[], Transport], gpu: torch.device | None = None
    ) -> None:
        self.rank, self.size, self._gpu = rank, size, gpu
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

    def submit(self, what: str, action: Callable[[Transport], Any], bytes_: int = 0) -> Future[Any]:
        """Have the communication thread run the action, in order; the future fails with a `GroupError`. ``bytes_``: see
        `Collective`."""
        future: Future[Any] = Future()
        ready = None
        if self._gpu is not None:
            ready = torch.cuda.Event(blocking=True)
            ready.record(torch.cuda.current_stream(self._gpu))
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
        return self.submit(what, action, bytes_).result()

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

    def _begin_here(self, what: str, tensor: torch.Tensor) -> Collective | None:
        """Return a collective to run on this thread, None if the communication thread has to run it."""
        if self._gpu is not None or self.transport is None or not self.transport.takes_at_once(tensor):
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
        began = time.monotonic()
        yield
        if self._gpu is not None:
            torch.cuda.current_stream(self._gpu).synchronize()
        assert self._current is not None
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
                if ready is not None:
                    ready.synchronize()
                self._current = collective
                collective.began = time.monotonic()
                self.doing = (collective.what, collective.began)
                result = action(self.transport)
                if self._gpu is not None:
                    torch.cuda.current_stream(self._gpu).synchronize()  # NCCL's wait() only holds up the stream
            except Exception as error:  # gloo and NCCL raise RuntimeError and its kin for anything
                self._broken(error)
                continue
            collective.ended = time.monotonic()
            self.doing = ("nothing", collective.ended)
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
