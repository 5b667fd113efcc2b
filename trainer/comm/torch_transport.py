"""What carries out collectives on the communication thread of a `trainer.comm.group.InterruptibleGroup`, and one over
gloo and NCCL. Others are `trainer.comm.socket_group` and `trainer.comm.parameter_server`."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trainer.comm.handshake import AuthenticationError
from trainer.comm.socket_group import FAR_BYTES, NEAR_BYTES, MeshGroup, connect_mesh, exchange_places
from trainer.runtime.cores import available_cores, yield_to_senders

ABORT_SECONDS = 1.0
"""For how long a rank that regroups waits for NCCL to let go of its GPU."""
MOST_RANKS = 8
"""The most ranks with channels for small sums: in larger worlds too few sums are small enough."""
NCCL_VARIABLES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Variables by which torch leaves it to `trainer.comm.group` to notice a peer that is lost. By default it ends the
process instead."""
FORMING_SECONDS = 5.0
"""The most seconds to form these channels."""
AWAKE_SECONDS = 2e-4
"""The seconds for which a rank that waits in a small sum polls, if it takes no core from another rank: waking up from
sleep takes longer than all the rest of a sum."""
_NONCE = 32
_SO_ATTACH_FILTER = 26
_listening = threading.Lock()
"""Held while gloo opens its listeners, which are found by what is new then."""
_log = logging.getLogger(__name__)


class Transport(Protocol):
    """The interface of a group that moves the data. Its methods block and run on the communication thread, unless
    stated otherwise."""

    linger_seconds: float
    """The seconds for which an operation may go on waiting in it after a failure."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copy the tensor of rank ``source`` to all ranks, in place."""
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return one JSON value from every rank, in order of rank."""
        ...

    def barrier(self, seconds: float) -> None:
        """Wait up to ``seconds`` for all ranks."""
        ...

    def takes_at_once(self, tensor: torch.Tensor) -> bool:
        """Return whether any thread may call `all_reduce` for such a tensor, because `interrupt` ends it. The answer is
        the same on all ranks."""
        ...

    def interrupt(self) -> None:
        """Make an `all_reduce` that `takes_at_once` allowed fail at once. Any thread may call it."""
        ...

    def abort(self) -> None:
        """Release a device that waits for a peer, after a failure. Any thread may call it, and more than once."""
        ...

    def close(self) -> None:
        """Close the connections of this rank."""
        ...


class TorchTransport:
    """A transport over gloo, and NCCL for tensors on GPUs, without torch's global default group: a stuck group can be
    left behind and a new one made beside it."""

    def __init__(
        self,
        group: Any,
        patient: Any,
        gpu: torch.device | None,
        timeout: float,
        make_group: Callable[[str, int, int], Any],
        small_sums: MeshGroup | None = None,
        close_store: Callable[[], None] = lambda: None,
    ) -> None:
        """Use ``make_group`` to make a subgroup from its name, this process's rank in it and its size.
        ``small_sums``: channels for small sums, if all ranks have them. ``close_store``: called when the store is no
        longer needed."""
        self.group, self._patient, self._gpu, self._make_group = group, patient, gpu, make_group
        self._small_sums, self._close_store = small_sums, close_store
        self._levels: tuple[Any, Any] | None = None
        self._subgroups: dict[tuple[int, ...], Any] = {}
        self._aborting, self._aborts = threading.Lock(), list[threading.Thread]()
        self.linger_seconds = timeout + 5.0  # the communication thread may be left behind in a collective
        if gpu is not None:
            torch.cuda.set_device(gpu)  # the communication thread's own choice
            torch.cuda.set_stream(torch.cuda.Stream(gpu))  # in the computation's stream, sums would wait for all of it

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place, with the same bits on all of them."""
        if tensor.is_cuda and self._gpu is None:  # a member without a GPU is among us
            host = tensor.detach().cpu()
            self.all_reduce(host)
            tensor.detach().copy_(host)
        elif self.takes_at_once(tensor):
            assert self._small_sums is not None
            self._small_sums.all_reduce(tensor)
        else:
            self.group.allreduce([tensor]).wait()

    def takes_at_once(self, tensor: torch.Tensor) -> bool:
        return self._small_sums is not None and self._small_sums.takes_at_once(tensor)

    def interrupt(self) -> None:
        if self._small_sums is not None:
            self._small_sums.interrupt()

    def all_to_all(self, output: torch.Tensor, input_: torch.Tensor) -> None:
        """Exchange rows: row j of ``input_`` goes to rank j, and row i of ``output`` comes from rank i."""
        self.group.alltoall_base(output, input_, [], []).wait()

    def all_gather(self, output: torch.Tensor, input_: torch.Tensor) -> None:
        """Gather rows: row i of ``output`` is the ``input_`` of rank i."""
        self.group._allgather_base(output.view(-1), input_.view(-1)).wait()

    def subgroup(self, ranks: Sequence[int]) -> Any:
        """Return the group of these ranks, in this order, of which this rank is one. The first call makes it, at the
        same place in the order of collectives on all of them."""
        members = tuple(ranks)
        if members == tuple(range(self.group.size())):
            return self.group
        if members not in self._subgroups:
            name = "ranks-" + "-".join(map(str, members))
            self._subgroups[members] = self._make_group(name, members.index(self.group.rank()), len(members))
        return self._subgroups[members]

    def gather_among(self, output: torch.Tensor, mine: torch.Tensor, ranks: Sequence[int]) -> None:
        """Gather rows of these ranks: the part of ``output`` at a rank's place among them is its ``mine``."""
        self.subgroup(ranks)._allgather_base(output, mine).wait()

    def scatter_sum(self, output: torch.Tensor, given: torch.Tensor, ranks: Sequence[int]) -> None:
        """Sum tensors over these ranks, and put the part at this rank's place among them into ``output``."""
        self.subgroup(ranks)._reduce_scatter_base(output, given).wait()

    def sum_among(self, tensor: torch.Tensor, ranks: Sequence[int]) -> None:
        """Sum over these ranks, in place."""
        self.subgroup(ranks).allreduce([tensor]).wait()

    def hierarchical_all_reduce(self, tensor: torch.Tensor, nodes: Sequence[int]) -> None:
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
        """Return the group of this rank's node and the group of the nodes' first ranks, each None if not needed."""
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

    def all_gather_object(self, value: Any) -> list[Any]:
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.group.size(), dtype=torch.int64)
        sizes[self.group.rank()] = len(mine)
        self.all_reduce(sizes)
        table = torch.zeros(self.group.size(), int(sizes.max()), dtype=torch.uint8)
        table[self.group.rank(), : len(mine)] = mine
        self.all_reduce(table)
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(table, sizes.tolist(), strict=True)]

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Send a tensor to rank ``target``."""
        self.group.send([tensor], target, 0).wait()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Receive into a tensor what rank ``source`` sends."""
        self.group.recv([tensor], source, 0).wait()

    def barrier(self, seconds: float) -> None:
        self._patient.allreduce([torch.zeros(1)]).wait()

    def abort(self) -> None:
        if self._gpu is not None:  # a kernel that waits for a peer would keep the GPU busy for ever
            groups = filter(None, (self.group, *(self._levels or ()), *self._subgroups.values()))
            with self._aborting:
                if not self._aborts:
                    self._aborts = abort_each([group._get_backend(self._gpu) for group in groups])
            if not end_within(self._aborts, ABORT_SECONDS):
                _log.warning("NCCL has not let go of the GPU %g s after it was told to", ABORT_SECONDS)

    def close(self) -> None:
        """Close the group without a message to the peers: their last barrier is over."""
        if self._small_sums is not None:
            self._small_sums.close()
        if self._gpu is None:  # NCCL's own threads may look into it at any time
            self._close_store()


def abort_each(backends: Sequence[Any]) -> list[threading.Thread]:
    """Abort these backends of groups, and return the threads that do it, one for each: NCCL's aborts wait for each
    other, so one after the other they may never end."""
    threads = [threading.Thread(target=each.abort, name="abort", daemon=True) for each in backends]
    for thread in threads:
        thread.start()
    return threads


def end_within(threads: Sequence[threading.Thread], seconds: float) -> bool:
    """Wait for threads, up to ``seconds``; return whether all have ended."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def make_torch_transport(
    store: dist.Store,
    rank: int,
    size: int,
    gpu: torch.device | None,
    timeout: float,
    patience: float,
    host: str,
    key: bytes = b"",
    close_store: Callable[[], None] = lambda: None,
) -> TorchTransport:
    """Return a transport over a store that no other group uses. ``patience``: the timeout of barriers, in seconds.
    ``host``: the address of this host; gloo listens there unless GLOO_SOCKET_IFNAME is set. ``key``: the key that only
    the ranks have. ``close_store``: called when the transport is closed, or cannot be made."""

    def make(name: str, rank: int, size: int, gpu: Any = gpu, seconds: float = timeout) -> Any:
        group, listeners = _group(dist.PrefixStore(name, store), rank, size, gpu, seconds, host)
        prove_connections(group, rank, size, hmac.digest(key, f"gloo/{name}".encode(), "sha256"), timeout)
        _deafen(listeners)
        return group

    try:
        data = make("data", rank, size)
        patient = make("patient", rank, size, None, patience)
        small_sums = None
        if gpu is None and size <= MOST_RANKS:
            words = hmac.digest(key, b"small_sums", "sha256")
            small_sums = _join_small_sums(dist.PrefixStore("small_sums", store), rank, size, host, timeout, data, words)
    except BaseException:
        close_store()
        raise
    return TorchTransport(data, patient, gpu, timeout, make, small_sums, close_store)


def _join_small_sums(
    store: dist.Store, rank: int, size: int, host: str, timeout: float, group: Any, key: bytes
) -> MeshGroup | None:
    """Return a group for small sums if all ranks have one, else None: it is optional. ``group``: gloo's group of these
    ranks."""
    links = None
    try:
        listener, places = exchange_places(store, rank, size, host)
        # Others may wait in a collective already.
        channels = connect_mesh(places, rank, listener, key, min(FORMING_SECONDS, timeout / 2))
        here = sum(address == host for address, _ in places)
        small = NEAR_BYTES if size == 2 or here == size else FAR_BYTES
        has_cores = here * torch.get_num_threads() <= available_cores()
        links = MeshGroup(rank, channels, timeout, small, AWAKE_SECONDS if has_cores else 0.0)
    except (OSError, RuntimeError) as error:  # RuntimeError is what a store raises
        _log.warning("rank %d has no channels to all others: %s; small sums go through gloo", rank, error)
    having, all_have = torch.tensor([links is not None], dtype=torch.int64), False
    try:
        group.allreduce([having]).wait()
        all_have = int(having) == size
    finally:
        if links is not None and not all_have:
            links.close()
    return links if all_have else None


def _group(
    store: dist.Store, rank: int, size: int, gpu: torch.device | None, timeout: float, host: str
) -> tuple[Any, set[int]]:
    """Return a group and the descriptors at which gloo listens for its ranks; none if the system does not list them."""
    kind = dist.ProcessGroup.BackendType
    group = dist.ProcessGroup(store, rank, size)
    with _listening:
        before = _inherited_listeners()
        options = _gloo_options(timeout, host)
        listeners = _inherited_listeners() - before
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
    yield_to_senders()
    group._register_backend(torch.device("cpu"), kind.GLOO, gloo)
    group._set_default_backend(kind.GLOO)
    if gpu is not None:
        for name, value in NCCL_VARIABLES.items():
            os.environ.setdefault(name, value)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        group._register_backend(gpu, kind.NCCL, nccl)
        group._set_default_backend(kind.NCCL)
    return group, listeners


def prove_connections(group: Any, rank: int, size: int, key: bytes, seconds: float) -> None:
    """Have each pair of ranks prove to each other, over gloo's connection between them, that they have the key.

    Gloo takes the first connection that names a pair's number, which is easy to guess: a stranger could come before the
    peer. Raise `AuthenticationError` with the ranks that did not, and gloo's error if one sends nothing in
    ``seconds``."""
    mine = torch.frombuffer(bytearray(secrets.token_bytes(_NONCE * size)), dtype=torch.uint8).view(size, _NONCE)
    theirs = _swapped(group, mine, seconds)

    def proof(maker: int, checker: int, challenge: torch.Tensor, own: torch.Tensor) -> bytes:
        text = struct.pack("!II", maker, checker) + bytes(challenge.tolist()) + bytes(own.tolist())
        return hmac.digest(key, text, hashlib.sha256)

    answers = [proof(rank, peer, theirs[peer], mine[peer]) for peer in range(size)]
    got = _swapped(group, torch.frombuffer(bytearray(b"".join(answers)), dtype=torch.uint8).view(size, _NONCE), seconds)
    expected = [proof(peer, rank, mine[peer], theirs[peer]) for peer in range(size)]
    false = [
        peer
        for peer in range(size)
        if peer != rank and not hmac.compare_digest(bytes(got[peer].tolist()), expected[peer])
    ]
    if false:
        raise AuthenticationError(
            f"gloo's connections of rank {rank} to ranks {false} lead to a process that does not know this "
            "launch's secret: a foreign process connected before them"
        )


def _swapped(group: Any, rows: torch.Tensor, seconds: float) -> torch.Tensor:
    """Return rows of which row i comes from rank i; row j of ``rows`` goes to rank j over gloo's connections."""
    output, options = torch.empty_like(rows), dist.AllToAllOptions()
    options.timeout = timedelta(seconds=seconds)
    group.alltoall_base(output, rows.contiguous(), [], [], options).wait()
    return output


def _gloo_options(timeout: float, host: str) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs leave it out
    options._timeout = timedelta(seconds=timeout)
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        device = dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
    else:
        device = dist.ProcessGroupGloo.create_device(hostname=host)
    options._devices, options._threads = [device], 1
    return options


def _inherited_listeners() -> set[int]:
    """Return the listening sockets that a child process would have: gloo's are, Python's own never."""
    found = set[int]()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.get_inheritable(int(name)) and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(name))) as copy:
                        if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                            found.add(int(name))
    return found


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def _deafen(descriptors: Iterable[int]) -> None:
    """Have the kernel drop all packets for these listening sockets (a packet filter that lets nothing through), once a
    group has formed. Gloo would keep each connection of a stranger, and a process without a free descriptor ends at
    once when gloo accepts one.

    Existing connections are not affected. Where the system has no such filter, the sockets stay open: gloo then keeps
    strangers' connections, up to the limit of descriptors."""
    if sys.platform != "linux":
        return
    nothing = _Instruction(0x06, 0, 0, 0)  # return 0: keep no byte of any packet
    program = _Program(1, ctypes.pointer(nothing))
    for descriptor in descriptors:
        try:
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))
        except OSError as error:
            _log.debug("gloo is still listening: %s", error)
