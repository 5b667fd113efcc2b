"""The collectives of one generation, on a communication thread of their own.

A blocking collective of gloo cannot be interrupted: a rank that waits for a frozen peer waits for the whole timeout. So
it is the communication thread that waits in it, and the training waits for the thread, from which it can be woken:
`Group.fail` gives every waiter a `GroupError` at once and leaves the thread behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trainer.cores import yield_to_senders
from trainer.star import Star

# Groups that failed, and until when to keep them (time.monotonic): something may still wait in them, for a peer that
# never comes, and whoever drops the last reference to such a group of gloo waits for it as well.
_ABANDONED: list[tuple[Group, float]] = []
REMEMBERED = 1024
"""Collectives whose times a group keeps."""
SMALL_BYTES, PAIR_BYTES = 16 << 10, 1 << 20
"""A sum goes directly from each rank to each other one where a rank sends at most so much: among several, between two.
What is larger is left to gloo's ring, which sends it in parts, each with the whole timeout."""
UNSHARED = 32768
"""Numbers that torch adds up on one thread however many it has: more would start a second pool of threads, which takes
cores from the step."""


@dataclass(slots=True, eq=False)
class Collective:
    """One collective of this rank. Times are seconds of `time.monotonic`; None while it has not come so far."""

    sequence: int
    """1 for the group's first; on all ranks, the same number is the same collective."""
    what: str
    bytes: int
    """Of a tensor whose all-reduce would load each rank's link as much."""
    submitted: float
    began: float | None = None
    ended: float | None = None
    computing: float = 0.0
    """Seconds in between that are this rank's own work, and not the network's: compressing."""


class GroupError(RuntimeError):
    """A collective failed or was interrupted; the group is of no use any more. ``detail`` says what was going on.

    ``communication``: is that what failed? Else somebody called the group off, for a reason of another kind.
    """

    def __init__(self, message: str, detail: dict[str, Any] | None = None, communication: bool = True) -> None:
        super().__init__(message)
        self.detail, self.communication = detail or {}, communication


class Transport(Protocol):
    """What moves the data. Every method blocks, and is called on the communication thread."""

    linger_seconds: float
    """How long something may go on waiting in it after a failure."""

    def sum(self, tensor: torch.Tensor) -> None: ...
    def broadcast(self, tensor: torch.Tensor, source: int) -> None: ...
    def gather(self, value: Any) -> list[Any]: ...
    def barrier(self, seconds: float) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


class Group:
    """Ranks that talk to each other. ``open_transport`` is called on the communication thread.

    With a ``gpu``, a collective begins when the GPU has come to where it was submitted, and is over when its result is
    there: the communication thread waits for both, else the times would be those of asking for it. (That has not been
    run on a GPU yet.)
    """

    def __init__(
        self, rank: int, size: int, open_transport: Callable[[], Transport], gpu: torch.device | None = None
    ) -> None:  # fmt: skip
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
        """Have the communication thread do something, in order; the future fails with a `GroupError`. ``bytes_``: see
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
            last = self.collectives[-1].sequence if self.collectives else 0
            collective = Collective(last + 1, what, bytes_, time.monotonic())
            self.collectives.append(collective)
            self._queue.put((collective, action, future, ready))
        return future

    def run(self, what: str, action: Callable[[Transport], Any], bytes_: int = 0) -> Any:
        """The same, waited for."""
        return self.submit(what, action, bytes_).result()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Within an action: what follows is this rank's own work (`Collective.computing`)."""
        began = time.monotonic()
        yield
        if self._gpu is not None:
            torch.cuda.current_stream(self._gpu).synchronize()
        assert self._current is not None
        self._current.computing += time.monotonic() - began

    def fail(self, message: str, communication: bool = True) -> None:
        """From any thread: whoever waits, or will wait, gets a `GroupError`."""
        what, since = self.doing
        detail = {"operation": what, "waited_seconds": round(time.monotonic() - since, 3)}
        self._fail(GroupError(message, detail, communication))

    def close(self) -> None:
        """Leave. After a failure the thread may be stuck; it is left behind, with what it holds."""
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
        text = in_short(error)
        detail = {"operation": what, "waited_seconds": waited, "error": text}
        self._fail(GroupError(f"{what} failed after {waited:g} s: {text}", detail))


def is_communication(error: BaseException) -> bool:
    """Is this what gloo or NCCL raise? They have exceptions of their own only in part."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo/", "ProcessGroup", "NCCL"))


def in_short(error: BaseException) -> str:
    """What gloo says, without the place in its source and its advice."""
    text = re.sub(r"^\[\S+\] ", "", str(error).strip())
    return f"{type(error).__name__}: {text.split(' This is typically')[0]}"


class TorchTransport:
    """Gloo, and NCCL for tensors on GPUs, without torch's global default group: a group that is stuck can be left
    behind, and the next one made beside it."""

    def __init__(
        self, group: Any, patient: Any, gpu: torch.device | None, timeout: float,
        make_group: Callable[[str, int, int], Any],
    ) -> None:  # fmt: skip
        """``make_group``: another group, of some ranks, from its name, this process's rank in it and its size."""
        self.group, self._patient, self._gpu, self._make_group = group, patient, gpu, make_group
        self._levels: tuple[Any, Any] | None = None
        self.linger_seconds = timeout + 5.0  # the communication thread may be left behind in a collective
        if gpu is not None:
            torch.cuda.set_device(gpu)  # the communication thread's own choice
            torch.cuda.set_stream(torch.cuda.Stream(gpu))  # in that of the computation, sums would wait for all of it

    def sum(self, tensor: torch.Tensor) -> None:
        """In place, the same bits on all ranks."""
        others = self.group.size() - 1
        if tensor.is_cuda or others * tensor.nbytes > (PAIR_BYTES if others == 1 else SMALL_BYTES):
            self.group.allreduce([tensor]).wait()
        else:
            self._exchange(tensor)

    def _exchange(self, tensor: torch.Tensor) -> None:
        """Each rank sends all of it to each other one, and adds up: one message's time, where gloo's ring takes that of
        2 (W - 1) after each other, and a thread more. Between two ranks the bytes are the same. ``tensor``: contiguous,
        as for all that gloo does."""
        rank, size = self.group.rank(), self.group.size()
        parts = [tensor if peer == rank else torch.empty_like(tensor) for peer in range(size)]
        peers = [peer for peer in range(size) if peer != rank]
        works = [self.group.send([tensor], peer, 0) for peer in peers]
        works += [self.group.recv([parts[peer]], peer, 0) for peer in peers]
        for work in works:
            work.wait()
        for total, *rest in zip(*(part.view(-1).split(UNSHARED) for part in parts), strict=True):
            for part in rest:  # in order of rank, so that rounding is the same everywhere
                total += part
        if rank:
            tensor.copy_(parts[0])

    def swap(self, output: torch.Tensor, input_: torch.Tensor) -> None:
        """All to all: row j of ``input_`` goes to rank j, and row i of ``output`` comes from rank i."""
        self.group.alltoall_base(output, input_, [], []).wait()

    def collect(self, output: torch.Tensor, input_: torch.Tensor) -> None:
        """All-gather: row i of ``output`` is the ``input_`` of rank i."""
        self.group._allgather_base(output.view(-1), input_.view(-1)).wait()

    def sum_by_node(self, tensor: torch.Tensor, nodes: Sequence[int]) -> None:
        """Sum over ranks, in place: within each node, then between one rank of each, then back. ``nodes``: the node of
        each rank, the same in each call."""
        if self._levels is None:
            self._levels = self._make_levels(nodes)
        within, between = self._levels
        if within is not None:
            within.reduce([tensor], dist.ReduceOptions()).wait()  # to its rank 0
        if between is not None:
            between.allreduce([tensor]).wait()
        if within is not None:
            within.broadcast([tensor], dist.BroadcastOptions()).wait()

    def _make_levels(self, nodes: Sequence[int]) -> tuple[Any, Any]:
        """The group of this rank's node, and that of the nodes' first ranks; None where this rank needs none."""
        rank, names = self.group.rank(), sorted(set(nodes))
        mine = [other for other, node in enumerate(nodes) if node == nodes[rank]]
        within = between = None
        if len(mine) > 1:
            within = self._make_group(f"node-{nodes[rank]}", mine.index(rank), len(mine))
        if mine[0] == rank and len(names) > 1:
            between = self._make_group("between", names.index(nodes[rank]), len(names))
        return within, between

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        self.group.broadcast([tensor], options).wait()

    def gather(self, value: Any) -> list[Any]:
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.group.size(), dtype=torch.int64)
        sizes[self.group.rank()] = len(mine)
        self.sum(sizes)
        table = torch.zeros(self.group.size(), int(sizes.max()), dtype=torch.uint8)
        table[self.group.rank(), : len(mine)] = mine
        self.sum(table)
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(table, sizes.tolist(), strict=True)]

    def send(self, tensor: torch.Tensor, target: int) -> None:
        self.group.send([tensor], target, 0).wait()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        self.group.recv([tensor], source, 0).wait()

    def barrier(self, seconds: float) -> None:
        self._patient.allreduce([torch.zeros(1)]).wait()

    def abort(self) -> None:
        if self._gpu is not None:  # a kernel that waits for a peer would keep the GPU busy for ever
            for group in (self.group, *(self._levels or ())):
                if group is not None:
                    group._get_backend(self._gpu).abort()

    def close(self) -> None:
        """Nothing to say to the peers: they have had their last barrier."""


class StarTransport:
    """Parameter-server mode (D3): everything goes through rank 0."""

    linger_seconds = 0.0

    def __init__(self, star: Star) -> None:
        self.star = star

    def sum(self, tensor: torch.Tensor) -> None:
        self.star.sum(tensor)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if source == 0:
            self.star.broadcast(tensor)
            return
        if self.star.rank != source:
            tensor.zero_()
        self.star.sum(tensor)  # what the others add is nothing

    def gather(self, value: Any) -> list[Any]:
        return self.star.gather(value)

    def barrier(self, seconds: float) -> None:
        self.star.barrier(seconds)

    def abort(self) -> None:
        self.star.abort()

    def close(self) -> None:
        self.star.close()


def make_torch_transport(
    store: dist.Store, rank: int, size: int, gpu: torch.device | None, timeout: float, patience: float,
    host: str | None = None,
) -> TorchTransport:  # fmt: skip
    """A group over a store that no other group uses. ``patience``: the timeout of barriers, in seconds. ``host``: the
    address of this host that gloo uses; GLOO_SOCKET_IFNAME in the environment comes first."""

    def make(name: str, rank: int, size: int) -> Any:
        return _group(dist.PrefixStore(name, store), rank, size, gpu, timeout, host)

    data = make("data", rank, size)
    patient = _group(dist.PrefixStore("patient", store), rank, size, None, patience, host)
    return TorchTransport(data, patient, gpu, timeout, make)


def _group(
    store: dist.Store, rank: int, size: int, gpu: torch.device | None, timeout: float, host: str | None
) -> Any:  # fmt: skip
    kind = dist.ProcessGroup.BackendType
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, _gloo_options(timeout, host))
    yield_to_senders()
    group._register_backend(torch.device("cpu"), kind.GLOO, gloo)
    group._set_default_backend(kind.GLOO)
    if gpu is not None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        group._register_backend(gpu, kind.NCCL, nccl)
        group._set_default_backend(kind.NCCL)
    return group


def _gloo_options(timeout: float, host: str | None) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs leave it out
    options._timeout = timedelta(seconds=timeout)
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        device = dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
    elif host:
        device = dist.ProcessGroupGloo.create_device(hostname=host)
    else:
        device = dist.ProcessGroupGloo.create_default_device()
    options._devices, options._threads = [device], 1
    return options


def abandoned() -> bool:
    """Does a group that was left behind still hang in this process? Then the process must not wait for it to end."""
    return bool(_still_waiting())


def _still_waiting() -> list[tuple[Group, float]]:
    now = time.monotonic()
    return [(group, until) for group, until in _ABANDONED if group._thread.is_alive() or now < until]
