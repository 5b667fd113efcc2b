"""Ranks of a parameter-server group, as threads or, where one has to die or freeze, as processes; and a host in
between that listens.

Processes are forked from one that has torch loaded already, so that a world starts within a moment.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

from harness.worlds import FORKS
from trainer.comm.channel import PeerError
from trainer.comm.parameter_server import ParameterServerGroup
from trainer.comm.tls import CertificateFiles
from trainer.config import TLSConfig

TOKEN = b"the key of this job and generation"
PATIENCE = 60.0
"""Seconds after which a test fails that waits for something."""
Address = tuple[str, int]
Work = Callable[[ParameterServerGroup], Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank came to: what its work returned, or the error that it ended with."""

    value: Any = None
    error: str = ""
    message: str = ""
    blamed: int | None = None


def outcome_of(work: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(work())
    except PeerError as error:
        return Outcome(None, "PeerError", str(error), error.rank)
    except Exception as error:
        return Outcome(None, type(error).__name__, str(error))


def form(
    where: Any, rank: int, size: int, forming: float = PATIENCE, token: bytes = TOKEN, tls: TLSConfig | None = None
) -> ParameterServerGroup:
    """One rank's end of a group. ``where``: the server's listener for rank 0, its address for the others."""
    contexts = CertificateFiles(tls) if tls else None
    if rank == 0:
        return ParameterServerGroup.serve(where, size, token, forming, contexts)
    return ParameterServerGroup.connect_worker(where, rank, size, token, forming, contexts)


class Rank:
    """One rank on a thread. ``timeout``: of operations; ``forming``: until the group is there; seconds."""

    def __init__(
        self, where: Any, rank: int, size: int, work: Work, timeout: float = PATIENCE, forming: float = PATIENCE,
        token: bytes = TOKEN, tls: TLSConfig | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.formed = rank, threading.Event()
        self.group: ParameterServerGroup | None = None  # kept: nothing is closed only because nobody needs it any more
        self._ended: Future[Outcome] = Future()

        def be() -> Any:
            self.group = form(where, rank, size, forming, token, tls)
            self.group.timeout = timeout
            self.formed.set()
            result = work(self.group)
            self.group.close()
            return result

        threading.Thread(target=lambda: self._ended.set_result(outcome_of(be)), daemon=True).start()

    def outcome(self) -> Outcome:
        return self._ended.result(PATIENCE)


class Process:
    """One rank in a process of its own, which sums without end."""

    def __init__(self, where: Any, rank: int, size: int, numel: int, timeout: float, tls: TLSConfig | None) -> None:
        self._pipe, theirs = FORKS.Pipe()
        options = (where, rank, size, numel, timeout, tls)
        self._process = FORKS.Process(target=_sum_for_ever, args=(theirs, *options), daemon=True)
        self._process.start()
        theirs.close()

    def hear(self) -> Any:
        """That it has summed a few times; then how it ended."""
        assert self._pipe.poll(PATIENCE), "a rank says nothing"
        return self._pipe.recv()

    def signal(self, number: int) -> None:
        os.kill(self._process.pid or 0, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _sum_for_ever(
    pipe: Connection, where: Any, rank: int, size: int, numel: int, timeout: float, tls: TLSConfig | None
) -> None:
    def work() -> None:
        group = form(where, rank, size, tls=tls)
        group.timeout = timeout
        tensor = torch.ones(numel)
        for number in range(1_000_000):
            tensor.fill_(1.0)
            group.all_reduce(tensor)
            assert (tensor == group.size).all()
            if number == 2:
                pipe.send("summing")

    torch.set_num_threads(1)
    result = outcome_of(work)
    left = psutil.Process().net_connections("tcp")
    pipe.send(result if not left else Outcome(error=f"still open: {left}"))
    pipe.poll(PATIENCE)  # the end of a process closes its connections: it is not to help what is tested here


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def summing(*values: float) -> Work:
    def work(group: ParameterServerGroup) -> list[float]:
        tensor = torch.tensor(values)
        group.all_reduce(tensor)
        return tensor.tolist()

    return work


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
