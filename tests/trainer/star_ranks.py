"""Ranks of a parameter-server group as processes of their own, what they do there, and a host in between that listens.

Processes are forked from one that has torch loaded already, so that a world starts within a moment.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from worlds import FORKS

from trainer.comm.channel import PeerError
from trainer.comm.parameter_server import ParameterServerGroup
from trainer.comm.tls import CertificateFiles
from trainer.config import TLSConfig

TOKEN = b"the key of this job and generation"
PATIENCE = 60.0
"""Seconds after which a test fails that waits for something."""
Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank came to: what its work returned, or the error that it ended with."""

    value: Any = None
    error: str = ""
    message: str = ""
    blamed: int | None = None


class Rank:
    """One rank in a process of its own. ``timeout``: of operations; ``forming``: until the group is there; seconds."""

    def __init__(self, where: socket.socket | Address, rank: int, size: int, work: Callable[..., Any], *arguments: Any,
                 timeout: float = PATIENCE, forming: float = PATIENCE, token: bytes = TOKEN,
                 tls: TLSConfig | None = None) -> None:  # fmt: skip
        self.rank = rank
        self._pipe, theirs = FORKS.Pipe()
        options = (where, rank, size, timeout, forming, token, tls)
        self.process = FORKS.Process(target=_be, args=(theirs, options, work, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        """The next thing that the rank's work says."""
        assert self._pipe.poll(PATIENCE), f"rank {self.rank} says nothing"
        return self._pipe.recv()

    def tell(self, what: Any = None) -> None:
        self._pipe.send(what)

    def outcome(self) -> Outcome:
        """How it ended, whatever it said before."""
        while True:
            said = self.hear()
            if isinstance(said, Outcome):
                return said

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def start(size: int, work: Callable[..., Any], *arguments: Any, tls: TLSConfig | None = None,
          timeout: float = PATIENCE, order: list[int] | None = None) -> list[Rank]:  # fmt: skip
    """All ranks of a world, started in this order."""
    with listening() as listener:
        address = listener.getsockname()
        ranks = [
            Rank(address if rank else listener, rank, size, work, *arguments, timeout=timeout, tls=tls)
            for rank in (order or range(size))
        ]
    return sorted(ranks, key=lambda rank: rank.rank)


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def _be(pipe: Connection, options: tuple[Any, ...], work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    where, rank, size, timeout, forming, token, tls = options
    torch.set_num_threads(1)
    try:
        contexts = CertificateFiles(tls) if tls else None
        if rank == 0:
            group = ParameterServerGroup.serve(where, size, token, forming, contexts)
        else:
            group = ParameterServerGroup.connect_worker(where, rank, size, token, forming, contexts)
        group.timeout = timeout
        result = Outcome(work(group, pipe, *arguments))
        group.close()
    except PeerError as error:
        left = psutil.Process().net_connections("tcp")
        assert not left, left  # nothing is held open by who has lost its group
        result = Outcome(None, "PeerError", str(error), error.rank)
    except Exception as error:
        result = Outcome(None, type(error).__name__, str(error))
    pipe.send(result)
    pipe.poll(PATIENCE)  # the end of a process closes its connections: it is not to help what is tested here


# What ranks do.


def draws(rank: int, number: int) -> list[torch.Tensor]:
    """Tensors of all kinds, other values on each rank: odd sizes around a part's, numbers that overflow, none."""
    random = torch.Generator().manual_seed(1000 * rank + number)
    floats = torch.randn(700_001, generator=random)
    huge = torch.iinfo(torch.int64)
    integers = torch.randint(huge.min, huge.max, (262_147,), generator=random)
    return [
        floats,
        floats[:1].clone(),
        floats[:262_143].clone(),
        floats[:262_145].clone(),
        floats[:131_073].double() * math.pi,
        floats[:524_289].half(),
        floats[:77].bfloat16(),
        integers,
        integers[:5].to(torch.uint8),
        torch.empty(0),
        torch.empty(3, 0, dtype=torch.int64),
        floats[3].clone(),
        floats[:600].clone().view(20, 30).t(),
        torch.complex(floats[:9], floats[9:18]),
        torch.nn.Parameter(floats[:12].clone()),
    ]


def bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def sum_draws(group: ParameterServerGroup, pipe: Connection, delays: dict[int, float]) -> list[str]:
    """Digests of the sums."""
    result = []
    for tensor in draws(group.rank, 0):
        time.sleep(delays.get(group.rank, 0.0))
        group.all_reduce(tensor)
        result.append(bits(tensor))
    return result


def other_operations(group: ParameterServerGroup, pipe: Connection) -> dict[str, Any]:
    tensors = draws(group.rank, 1)
    for tensor in tensors:
        group.broadcast(tensor, 0)
    value = {"rank": group.rank, "text": "«ä» \n" * group.rank, "none": None, "list": [1.5, group.rank > 1]}
    return {
        "broadcast": [bits(tensor) for tensor in tensors],
        "gather": group.all_gather_object(value),
        "long": group.all_gather_object("x" * 3_000_000 * (group.rank == 1)),
        "barrier": group.barrier(PATIENCE),
    }


def come_late(group: ParameterServerGroup, pipe: Connection, late: int, seconds: float) -> tuple[float, float]:
    """When this rank came to the barrier, and when it left it (clock of the machine)."""
    if group.rank == late:
        time.sleep(seconds)
    came = time.monotonic()
    group.barrier(PATIENCE)
    return came, time.monotonic()


def sum_for_ever(group: ParameterServerGroup, pipe: Connection, numel: int = 2_000_000) -> None:
    tensor = torch.ones(numel)
    for number in range(1_000_000):
        tensor.fill_(1.0)
        group.all_reduce(tensor)
        assert (tensor == group.size).all()
        if number < 3:
            pipe.send(number)


def wait_without(group: ParameterServerGroup, pipe: Connection, absent: int) -> None:
    """All but one come to a sum; that one does nothing until it is told."""
    if group.rank == absent:
        pipe.poll(PATIENCE)
        return
    pipe.send("here")
    group.all_reduce(torch.ones(10))


def call_off(group: ParameterServerGroup, pipe: Connection, caller: int, numel: int | None) -> None:
    """One rank's other thread aborts, while all are in the middle of sums, or wait for a rank that does not come."""
    if numel is None and group.rank != caller:
        pipe.poll(PATIENCE)
        group.barrier(PATIENCE)
        return
    if group.rank == caller:
        threading.Timer(1.0, group.abort).start()
    while True:
        group.all_reduce(torch.ones(numel or 10))


def after_an_abort(group: ParameterServerGroup, pipe: Connection) -> list[str]:
    group.abort()
    said = []
    for action in (
        lambda: group.barrier(PATIENCE), lambda: group.all_reduce(torch.ones(1)),
        lambda: group.broadcast(torch.ones(1), 0),
    ):  # fmt: skip
        try:
            action()
        except PeerError as error:
            said.append(str(error))
    group.close()
    return said


def differ(group: ParameterServerGroup, pipe: Connection, what: str, odd: int) -> None:
    mine = group.rank == odd
    if what == "operation" and mine:
        group.all_gather_object(1)
    elif what == "broadcast" and mine:
        group.broadcast(torch.ones(6), 0)
    elif what == "type":
        group.all_reduce(torch.ones(6, dtype=torch.float64 if mine else torch.int64))
    else:
        group.all_reduce(torch.ones(7 if what == "size" and mine else 6))


def gather_nonsense(group: ParameterServerGroup, pipe: Connection, odd: int) -> None:
    group.all_gather_object({1, 2} if group.rank == odd else 1)


def share(group: ParameterServerGroup, pipe: Connection, operation: str, numel: int) -> str:
    """Digest of what was summed or broadcast."""
    tensor = torch.arange(numel, dtype=torch.float32) * (group.rank == 0)
    group.all_reduce(tensor) if operation == "sum" else group.broadcast(tensor, 0)
    return bits(tensor)


def sum_one(group: ParameterServerGroup, pipe: Connection, values: list[float]) -> list[float]:
    tensor = torch.tensor(values)
    group.all_reduce(tensor)
    return tensor.tolist()


class Tap:
    """A host between a worker and the server: passes on what comes, keeps a copy, and may be slow.

    ``bytes_per_second`` limits each direction, evenly.
    """

    def __init__(self, server: Address, bytes_per_second: float = math.inf) -> None:
        self.heard = bytearray()
        self._server, self._rate = server, bytes_per_second
        self._listener = listening()
        self.address: Address = self._listener.getsockname()
        self._sockets = [self._listener]
        self._lock = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._sockets:
            connection.close()

    def _serve(self) -> None:
        try:
            worker, _ = self._listener.accept()
        except OSError:
            return
        server = socket.create_connection(self._server)
        self._sockets += [worker, server]
        if self._rate < math.inf:
            for connection in (worker, server):  # or a kernel's buffers would swallow it all at once
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        for source, sink in ((worker, server), (server, worker)):
            threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 14):
                with self._lock:
                    self.heard += data
                if self._rate < math.inf:
                    time.sleep(len(data) / self._rate)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass


FREEZE, KILL, THAW = signal.SIGSTOP, signal.SIGKILL, signal.SIGCONT
