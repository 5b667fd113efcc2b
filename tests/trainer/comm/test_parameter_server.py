"""Parameter-server mode: real sockets, plain and with TLS, and real processes where one of them dies or freezes."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import Any

import psutil
import pytest
import star_ranks as at
import torch
from certificates import Authority
from star_ranks import Outcome, Process, Rank, Tap, Work, listening, summing

from trainer.comm import parameter_server
from trainer.comm.channel import _HEAD, ADMITTED, REFUSED, PeerError, open_connection
from trainer.comm.handshake import REPLY, Caller
from trainer.comm.parameter_server import ParameterServerGroup
from trainer.config import TLSConfig

pytestmark = pytest.mark.slow
Join = Callable[..., Rank]
Start = Callable[..., list[Rank]]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> TLSConfig:
    return Authority(tmp_path_factory.mktemp("certificates")).node()


# What holds with TLS holds without: the frames are the same, over fewer layers. `make test-all` shows that as well.
@pytest.fixture(params=[pytest.param("plain", marks=pytest.mark.long), "TLS"])
def tls(request: pytest.FixtureRequest, certificate: TLSConfig) -> TLSConfig | None:
    return certificate if request.param == "TLS" else None


@pytest.fixture
def join(tls: TLSConfig | None) -> Iterator[Join]:
    """Starts a rank on a thread. When all have ended, none of them holds a connection open."""
    before, ranks = psutil.Process().net_connections("tcp"), list[Rank]()

    def begin(where: Any, rank: int, size: int, work: Work | None = None, **options: Any) -> Rank:
        ranks.append(Rank(where, rank, size, work or summing(1.0 + rank), **{"tls": tls, **options}))
        return ranks[-1]

    yield begin
    for rank in ranks:
        rank.outcome()
    left = {item.fd for item in psutil.Process().net_connections("tcp")} - {item.fd for item in before}
    assert not left


@pytest.fixture
def start(join: Join) -> Start:
    def begin(size: int, work: Work, order: tuple[int, ...] = (), **options: Any) -> list[Rank]:
        """All ranks of a world, started in this order."""
        listener = listening()
        where = [listener, *[listener.getsockname()] * (size - 1)]
        ranks = [join(where[rank], rank, size, work, **options) for rank in order or range(size)]
        return sorted(ranks, key=lambda rank: rank.rank)

    return begin


@pytest.fixture
def served(join: Join) -> Callable[..., tuple[Rank, at.Address]]:
    """Starts a server that waits for its workers; it and its address."""

    def begin(size: int, **options: Any) -> tuple[Rank, at.Address]:
        listener = listening()
        address = listener.getsockname()
        return join(listener, 0, size, **options), address

    return begin


def outcomes(*ranks: Rank) -> list[Outcome]:
    return [rank.outcome() for rank in ranks]


def values(*ranks: Rank) -> list[Any]:
    ended = outcomes(*ranks)
    assert all(not outcome.error for outcome in ended), ended
    return [outcome.value for outcome in ended]


def blamed(*ranks: Rank) -> list[tuple[str, int | None]]:
    return [(outcome.error, outcome.blamed) for outcome in outcomes(*ranks)]


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (2, 0, 3, 1)])
def test_a_sum_does_not_depend_on_who_comes_first(start: Start, order: tuple[int, ...]) -> None:
    numbers = torch.randn(4, 700_001, generator=torch.Generator().manual_seed(0))

    def in_order(ranks: Sequence[int]) -> torch.Tensor:
        return reduce(torch.add, numbers[list(ranks)])

    def work(group: ParameterServerGroup) -> torch.Tensor:
        for _ in range(3):
            tensor = numbers[group.rank].clone()
            time.sleep(0.03 * order.index(group.rank))
            group.all_reduce(tensor)
        return tensor

    assert not torch.equal(in_order(order), in_order(range(4)))  # or nothing would be shown
    assert all(torch.equal(found, in_order(range(4))) for found in values(*start(4, work, order=order)))


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.long), 2])
def test_nobody_leaves_a_barrier_before_all_have_come(start: Start, late: int) -> None:
    """It has a patience of its own: the group's is over long before the last one comes."""

    def work(group: ParameterServerGroup) -> tuple[float, float]:
        time.sleep(1.5 * (group.rank == late))
        came = time.monotonic()
        group.barrier(at.PATIENCE)
        return came, time.monotonic()

    times = values(*start(3, work, timeout=0.5))
    assert min(left for _, left in times) >= max(came for came, _ in times)


def test_a_world_of_one_has_nobody_to_wait_for() -> None:
    server = ParameterServerGroup.serve(listening(), 1, at.TOKEN, 1.0)
    tensor = torch.randn(5)
    before = tensor.clone()
    server.all_reduce(tensor)
    server.broadcast(tensor, 0)
    server.barrier(1.0)
    assert server.all_gather_object("me") == ["me"]
    assert torch.equal(tensor, before)


@pytest.mark.parametrize(
    ("how", "lost", "numel"),
    [
        (signal.SIGKILL, 2, 2_000_000),
        (signal.SIGKILL, 0, 2_000_000),
        (signal.SIGSTOP, 2, 10),
        pytest.param(signal.SIGSTOP, 2, 2_000_000, marks=pytest.mark.long),
        (signal.SIGSTOP, 0, 2_000_000),
    ],
)
def test_who_is_killed_or_frozen_is_named_by_all(tls: TLSConfig | None, how: int, lost: int, numel: int) -> None:
    """The dead at once, the frozen when the time is over; that one finds out that the others have gone on."""
    timeout = 4.0 if how == signal.SIGSTOP else at.PATIENCE
    with listening() as listener:
        where = [listener, *[listener.getsockname()] * 3]
        ranks = [Process(where[rank], rank, 4, numel, timeout, tls) for rank in range(4)]
    try:
        assert [rank.hear() for rank in ranks] == ["summing"] * 4
        ranks[lost].signal(how)
        for rank, process in enumerate(ranks):
            if rank != lost:
                outcome = process.hear()
                assert (outcome.error, outcome.blamed) == ("PeerError", lost), outcome
                assert f"rank {lost}" in outcome.message or f"ranks [{lost}]" in outcome.message
        if how == signal.SIGSTOP:
            ranks[lost].signal(signal.SIGCONT)
            assert ranks[lost].hear().error == "PeerError"
    finally:
        for process in ranks:
            process.end()


def test_who_does_not_come_to_an_operation_is_named(start: Start) -> None:
    over = threading.Event()

    def work(group: ParameterServerGroup) -> None:
        if group.rank == 2:
            over.wait(at.PATIENCE)
        else:
            group.all_reduce(torch.ones(10))

    ranks = start(4, work, timeout=1.0)
    absent = ranks.pop(2)
    assert blamed(*ranks) == [("PeerError", 2)] * 3
    over.set()
    assert values(absent) == [None]


@pytest.mark.parametrize("numel", [None, 2_000_000])
@pytest.mark.parametrize("caller", [0, 1])
def test_abort_wakes_who_waits_in_an_operation(start: Start, caller: int, numel: int | None) -> None:
    """Another thread calls it off: in the middle of sums, or while one waits for ranks that do not come."""
    over = threading.Event()

    def work(group: ParameterServerGroup) -> None:
        if numel is None and group.rank != caller:
            over.wait(at.PATIENCE)
            group.barrier(at.PATIENCE)
        if group.rank == caller:
            threading.Timer(0.5, group.abort).start()
        while True:
            group.all_reduce(torch.ones(numel or 10))

    others = start(3, work)
    outcome = others.pop(caller).outcome()
    assert (outcome.error, outcome.blamed) == ("PeerError", None), outcome
    assert "called off" in outcome.message
    over.set()
    assert blamed(*others) == [("PeerError", caller)] * 2


def test_nothing_works_after_an_abort(start: Start) -> None:
    def work(group: ParameterServerGroup) -> None:
        group.abort()
        for action in (
            lambda: group.barrier(at.PATIENCE), lambda: group.all_reduce(torch.ones(1)),
            lambda: group.broadcast(torch.ones(1), 0),
        ):  # fmt: skip
            with pytest.raises(PeerError):
                action()

    assert values(*start(2, work)) == [None, None]


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize(
    ("act", "word"),
    [
        (lambda group: group.all_gather_object(1), "(gather, "),
        (lambda group: group.broadcast(torch.ones(6), 0), "(broadcast, 24"),
        (lambda group: group.all_reduce(torch.ones(6, dtype=torch.float64)), "(sum float64, 48 bytes)"),
        (lambda group: group.all_reduce(torch.ones(7)), "28 bytes"),
    ],
    ids=["operation", "broadcast", "type", "size"],
)
def test_ranks_that_do_not_do_the_same_all_hear_of_it(start: Start, act: Work, word: str, odd: int) -> None:
    def work(group: ParameterServerGroup) -> None:
        act(group) if group.rank == odd else group.all_reduce(torch.ones(6))

    ended = outcomes(*start(3, work))
    assert {outcome.error for outcome in ended} == {"PeerError"}
    [named] = {outcome.blamed for outcome in ended}
    assert named in ([2] if odd == 2 else [1, 2])  # whom the server hears first, if it is the odd one
    assert all(word in outcome.message and "(sum " in outcome.message for outcome in ended), ended


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_fails_by_itself_leaves_nobody_waiting(start: Start, odd: int) -> None:
    others = start(3, lambda group: group.all_gather_object({1, 2} if group.rank == odd else 1))
    assert others.pop(odd).outcome().error == "TypeError"
    assert blamed(*others) == [("PeerError", odd)] * 2


@pytest.mark.parametrize(
    ("operation", "tls"), [("broadcast", "plain"), pytest.param("sum", "TLS", marks=pytest.mark.long)], indirect=["tls"]
)
def test_a_slow_connection_is_no_failure(join: Join, operation: str) -> None:
    """Several times longer than the timeout, but never silent for as long. More than the kernels' buffers hold."""
    numel = 3_000_000

    def work(group: ParameterServerGroup) -> bool:
        tensor = torch.arange(numel, dtype=torch.float32) * (group.rank == 0)
        group.all_reduce(tensor) if operation == "sum" else group.broadcast(tensor, 0)
        return bool(torch.equal(tensor, torch.arange(numel, dtype=torch.float32)))

    listener = listening()
    with Tap(listener.getsockname(), bytes_per_second=3_000_000) as tap:
        ranks = [join(where, rank, 2, work, timeout=1.5) for rank, where in ((0, listener), (1, tap.address))]
        assert values(*ranks) == [True, True]


# At the door.


def test_a_worker_with_another_key_is_turned_away_and_the_right_one_let_in(join: Join, served: Any) -> None:
    server, address = served(2)
    outcome = join(address, 1, 2, token=b"the key of another generation").outcome()
    assert (outcome.error, outcome.blamed) == ("PeerError", 0)
    assert "does not prove that it knows this launch's secret" in outcome.message
    assert "another generation" not in outcome.message  # a key is not for logs
    assert values(server, join(address, 1, 2)) == [[3.0], [3.0]]


@pytest.mark.parametrize(("rank", "why"), [(3, "rank '3' in a world of 3"), (2, "rank 2 is already connected")])
@pytest.mark.parametrize("tls", ["plain"], indirect=True)
def test_a_worker_that_does_not_fit_is_turned_away(join: Join, served: Any, rank: int, why: str) -> None:
    server, address = served(3)
    second = join(address, 2, 3)
    assert second.formed.wait(at.PATIENCE), "or the other one would be the first"
    outcome = join(address, rank, 3).outcome()
    assert outcome.error == "PeerError"
    assert why in outcome.message
    assert values(server, second, join(address, 1, 3)) == [[6.0]] * 3


def test_all_hear_of_it_when_one_does_not_come(join: Join, served: Any) -> None:
    """Those who came would wait for a minute."""
    server, address = served(4, forming=2.0)
    workers = [join(address, rank, 4) for rank in (1, 3)]
    assert blamed(server, *workers) == [("PeerError", 2)] * 3
    assert "ranks [2] did not connect to the server within 2 s" in server.outcome().message
    assert all("ranks [2] did not connect" in worker.outcome().message for worker in workers)


@pytest.mark.parametrize("tls", ["plain"], indirect=True)
def test_a_worker_waits_for_a_server_that_is_not_there_yet(join: Join) -> None:
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    worker = join(reserved.getsockname(), 1, 2)
    time.sleep(0.5)
    reserved.listen()
    assert values(join(reserved, 0, 2), worker) == [[3.0], [3.0]]


def test_no_server_is_an_error_that_says_where_it_was_looked_for() -> None:
    with listening() as listener:
        address = listener.getsockname()
    with pytest.raises(PeerError, match=f"rank 0, the server: 127.0.0.1:{address[1]} cannot be reached"):
        ParameterServerGroup.connect_worker(address, 1, 2, at.TOKEN, 1.0)


def test_a_connection_that_meets_itself_is_no_server() -> None:
    """Where nobody listens, a connection on loopback that happens to be given the port it asks for succeeds: once in
    some ten thousand attempts, and a worker that waits for its server makes over a thousand."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    errors = (_refused(first + number % (last - first)) for number in range(1_000_000))
    assert any(error.errno is None for error in errors)  # our own, not the system's


def _refused(port: int) -> OSError:
    try:
        with open_connection(("127.0.0.1", port), 1.0) as connection:
            assert connection.getsockname() != connection.getpeername()
    except OSError as error:
        return error
    return OSError(0, "somebody listens there")


def test_a_size_that_no_memory_holds_is_no_lack_of_memory() -> None:
    """It would set off a search for a smaller batch."""
    listener = listening()
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(ParameterServerGroup.serve, listener, 2, at.TOKEN, at.PATIENCE)
        worker = bare_worker(listener.getsockname(), 1, 2)
    server = forming.result(at.PATIENCE)
    worker.sendall(_HEAD.pack(1, b"gather", 1 << 46))
    with pytest.raises(PeerError, match=r"it announces 70,368,744,177,664 bytes"):
        server.all_gather_object(1)
    worker.close()


def test_last_words_never_get_into_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that reads nothing has been sent half a part when another one dies: no sum must end in a message."""
    monkeypatch.setattr(parameter_server, "TELL_SECONDS", at.PATIENCE)  # on a busy machine, too
    listener, results = listening(), list[str]()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # less than a part is on its way
    address = listener.getsockname()

    def be_server() -> None:
        server = ParameterServerGroup.serve(listener, 3, at.TOKEN, at.PATIENCE)
        try:
            server.all_reduce(torch.ones(parameter_server.PART_BYTES // 2))
        except PeerError as error:
            results.append(str(error))

    thread = threading.Thread(target=be_server)
    thread.start()
    slow, dying = (bare_worker(address, rank, 3) for rank in (1, 2))
    twos = _HEAD.pack(1, b"sum float32", 2 * parameter_server.PART_BYTES)
    twos += torch.full((parameter_server.PART_BYTES // 2,), 2.0).numpy().tobytes()
    dying.sendall(twos[: parameter_server.PART_BYTES * 3 // 2])
    slow.sendall(twos[: parameter_server.PART_BYTES * 3 // 2])
    part = _HEAD.pack(2, b"sum float32", parameter_server.PART_BYTES)
    part += torch.full((parameter_server.PART_BYTES // 4,), 5.0).numpy().tobytes()
    assert receive(dying, len(part)) == part
    dying.close()  # the server has all of the first part, and waits for the rest of the second one
    heard = receive(slow, 1 << 30)
    slow.close()
    thread.join(at.PATIENCE)
    assert heard[: len(part)] == part
    last_words = heard[len(part) :]
    assert _HEAD.unpack(last_words[: _HEAD.size])[1].rstrip(b"\0") == REFUSED
    assert json.loads(last_words[_HEAD.size :]) == {"rank": 2, "text": results[0]}


def receive(worker: socket.socket, size: int) -> bytes:
    """So many bytes, or what comes until the end."""
    heard = bytearray()
    while len(heard) < size and (data := worker.recv(min(1 << 20, size - len(heard)))):
        heard += data
    return bytes(heard)


def bare_worker(address: at.Address, rank: int, size: int) -> socket.socket:
    """One that has proven who it is, and whose kernel takes little at a time. The server must be there."""
    worker = socket.socket()
    worker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    worker.connect(address)
    caller = Caller(at.TOKEN, str(rank), parameter_server.SERVER)
    worker.sendall(caller.hello)
    worker.sendall(caller.answer(receive(worker, REPLY.size)))
    assert receive(worker, _HEAD.size) == _HEAD.pack(1, ADMITTED, 0)
    return worker


def test_an_error_leaves_no_file_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(PeerError):
            ParameterServerGroup.serve(listening(), 3, at.TOKEN, 0.05)
    assert set(os.listdir("/proc/self/fd")) == before
