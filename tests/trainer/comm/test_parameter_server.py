"""Parameter-server mode: real processes and sockets, plain and with TLS."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import star_ranks as at
import torch
from certificates import Authority
from star_ranks import FREEZE, KILL, THAW, Outcome, Rank, Tap, listening

from trainer.comm import parameter_server
from trainer.comm.framed_socket import open_connection
from trainer.comm.handshake import REPLY, Caller
from trainer.comm.parameter_server import ParameterServerError, ParameterServerGroup
from trainer.config import TLSConfig

pytestmark = pytest.mark.slow
Start = Callable[..., list[Rank]]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> TLSConfig:
    return Authority(tmp_path_factory.mktemp("certificates")).node()


# What holds with TLS holds without: the frames are the same, over fewer layers. `make test-all` shows that as well.
@pytest.fixture(params=[pytest.param("plain", marks=pytest.mark.long), "TLS"])
def tls(request: pytest.FixtureRequest, certificate: TLSConfig) -> TLSConfig | None:
    return certificate if request.param == "TLS" else None


@pytest.fixture
def alive() -> Iterator[list[Rank]]:
    """Ranks that are ended with the test."""
    ranks: list[Rank] = []
    yield ranks
    for rank in ranks:
        rank.end()


@pytest.fixture
def start(alive: list[Rank], tls: TLSConfig | None) -> Start:
    def begin(size: int, work: Any, *arguments: Any, **options: Any) -> list[Rank]:
        ranks = at.start(size, work, *arguments, tls=tls, **options)
        alive.extend(ranks)
        return ranks

    return begin


def outcomes(ranks: list[Rank]) -> list[Outcome]:
    return [rank.outcome() for rank in ranks]


def values(ranks: list[Rank]) -> list[Any]:
    ended = outcomes(ranks)
    assert all(not outcome.error for outcome in ended), ended
    return [outcome.value for outcome in ended]


def in_order(ranks: range | list[int]) -> list[str]:
    """The sums as they have to be, digests: one rank's after the other."""
    first, *others = [[tensor.detach().clone() for tensor in at.draws(rank, 0)] for rank in ranks]
    for other in others:
        for total, tensor in zip(first, other, strict=True):
            total += tensor
    return [at.bits(tensor) for tensor in first]


@pytest.mark.parametrize("size", [2, 4])
def test_a_sum_has_the_same_bits_on_all_ranks(start: Start, size: int) -> None:
    for result in values(start(size, at.sum_draws, {})):
        assert result == in_order(range(size))


def test_a_sum_does_not_depend_on_who_comes_first(start: Start) -> None:
    assert in_order([0, 1, 2, 3]) != in_order([3, 2, 1, 0])  # or nothing would be shown
    for order in ([3, 2, 1, 0], [2, 0, 3, 1]):
        delays = {rank: 0.03 * place for place, rank in enumerate(order)}
        for result in values(start(4, at.sum_draws, delays, order=order)):
            assert result == in_order(range(4))


def test_broadcast_gather_and_barrier(start: Start) -> None:
    results = values(start(3, at.other_operations))
    of_rank_0 = [at.bits(tensor) for tensor in at.draws(0, 1)]
    said = [
        {"rank": rank, "text": "«ä» \n" * rank, "none": None, "list": [1.5, rank > 1]} for rank in range(3)
    ]  # fmt: skip
    for result in results:
        assert result["broadcast"] == of_rank_0
        assert result["gather"] == said
        assert result["long"] == ["", "x" * 3_000_000, ""]


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.long), 2])
def test_nobody_leaves_a_barrier_before_all_have_come(start: Start, late: int) -> None:
    """It has a patience of its own: the group's is over long before the last one comes."""
    times = values(start(3, at.come_late, late, 3.0, timeout=1.0))
    assert min(left for _, left in times) >= max(came for came, _ in times)


def test_a_world_of_one_has_nobody_to_wait_for() -> None:
    server = ParameterServerGroup.serve(listening(), 1, at.TOKEN, 1.0)
    tensor = torch.randn(5)
    before = tensor.clone()
    server.all_reduce(tensor)
    server.broadcast(tensor)
    server.barrier()
    assert server.all_gather_object("me") == ["me"]
    assert torch.equal(tensor, before)


def test_a_killed_worker_is_named_by_all(start: Start) -> None:
    ranks = start(4, at.sum_for_ever)
    assert [ranks[3].hear() for _ in range(3)] == [0, 1, 2]
    ranks[2].signal(KILL)
    for rank in (0, 1, 3):
        outcome = ranks[rank].outcome()
        assert (outcome.error, outcome.blamed, outcome.operation) == ("ParameterServerError", 2, "sum"), outcome
        assert "rank 2 failed in sum" in outcome.message


def test_a_killed_server_is_named_by_all(start: Start) -> None:
    ranks = start(3, at.sum_for_ever)
    assert [ranks[2].hear() for _ in range(3)] == [0, 1, 2]
    ranks[0].signal(KILL)
    for rank in (1, 2):
        outcome = ranks[rank].outcome()
        assert (outcome.error, outcome.blamed, outcome.operation) == ("ParameterServerError", 0, "sum"), outcome


@pytest.mark.parametrize("numel", [10, pytest.param(2_000_000, marks=pytest.mark.long)])
def test_a_frozen_worker_is_named_by_all_when_the_time_is_over(start: Start, numel: int) -> None:
    ranks = start(3, at.sum_for_ever, numel, timeout=4.0)
    assert [ranks[2].hear() for _ in range(3)] == [0, 1, 2]
    ranks[2].signal(FREEZE)
    for rank in (0, 1):
        outcome = ranks[rank].outcome()
        assert (outcome.error, outcome.blamed, outcome.operation) == ("ParameterServerError", 2, "sum"), outcome
    assert "no data arrived from it in time" in outcome.message
    ranks[2].signal(THAW)
    assert ranks[2].outcome().error == "ParameterServerError"  # it finds out that the others have gone on


def test_a_frozen_server_is_named_by_all_when_the_time_is_over(start: Start) -> None:
    ranks = start(3, at.sum_for_ever, timeout=4.0)
    assert [ranks[2].hear() for _ in range(3)] == [0, 1, 2]
    ranks[0].signal(FREEZE)
    for rank in (1, 2):
        outcome = ranks[rank].outcome()
        assert (outcome.error, outcome.blamed, outcome.operation) == ("ParameterServerError", 0, "sum"), outcome
    ranks[0].signal(THAW)
    assert ranks[0].outcome().error == "ParameterServerError"


def test_who_does_not_come_to_an_operation_is_named(start: Start) -> None:
    ranks = start(4, at.wait_without, 2, timeout=4.0)
    for rank in (0, 1, 3):
        outcome = ranks[rank].outcome()
        assert (outcome.error, outcome.blamed, outcome.operation) == ("ParameterServerError", 2, "sum"), outcome


@pytest.mark.parametrize("numel", [None, 2_000_000])
@pytest.mark.parametrize("caller", [0, 1])
def test_abort_wakes_who_waits_in_an_operation(start: Start, caller: int, numel: int | None) -> None:
    ranks = start(3, at.call_off, caller, numel)
    outcome, *others = ranks[caller].outcome(), *(rank for rank in ranks if rank.rank != caller)
    assert (outcome.error, outcome.blamed, outcome.operation) == ("ParameterServerError", None, "sum"), outcome
    assert "called off" in outcome.message
    for rank in others:
        rank.tell()
    for other in outcomes(others):
        assert (other.error, other.blamed) == ("ParameterServerError", caller), other


def test_nothing_works_after_an_abort(start: Start) -> None:
    for said in values(start(2, at.after_an_abort)):
        assert len(said) == 3
        assert "barrier" in said[0] or "gather was called off" in said[0]
        assert all("after the group broke" in text for text in said[1:])


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("what", ["operation", "broadcast", "type", "size"])
def test_ranks_that_do_not_do_the_same_all_hear_of_it(start: Start, what: str, odd: int) -> None:
    ended = outcomes(start(3, at.differ, what, odd))
    assert {outcome.error for outcome in ended} == {"ParameterServerError"}
    [blamed] = {outcome.blamed for outcome in ended}
    assert blamed in ([2] if odd == 2 else [1, 2])  # whom the server hears first, if it is the odd one
    words = {
        "operation": "gather of ",
        "broadcast": "broadcast of 24",
        "type": "48 bytes of float64",
        "size": "28 bytes",
    }
    assert all(words[what] in outcome.message and "sum of " in outcome.message for outcome in ended), ended


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_fails_by_itself_leaves_nobody_waiting(start: Start, odd: int) -> None:
    ended = outcomes(start(3, at.gather_nonsense, odd))
    assert ended[odd].error == "TypeError"
    others = [outcome for rank, outcome in enumerate(ended) if rank != odd]
    assert {(outcome.error, outcome.blamed) for outcome in others} == {("ParameterServerError", odd)}


@pytest.mark.parametrize(
    ("operation", "tls"), [("broadcast", "plain"), pytest.param("sum", "TLS", marks=pytest.mark.long)], indirect=["tls"]
)
def test_a_slow_connection_is_no_failure(alive: list[Rank], tls: TLSConfig | None, operation: str) -> None:
    """Several times longer than the timeout, but never silent for as long. More than the kernels' buffers hold."""
    numel = 3_000_000
    with listening() as listener, Tap(listener.getsockname(), bytes_per_second=1_500_000) as tap:
        alive += [
            Rank(where, rank, 2, at.share, operation, numel, timeout=3.0, tls=tls)
            for rank, where in ((0, listener), (1, tap.address))
        ]
        assert values(alive) == [at.bits(torch.arange(numel, dtype=torch.float32))] * 2


# At the door.


def test_a_worker_with_another_key_is_turned_away_and_the_right_one_let_in(
    alive: list[Rank], tls: TLSConfig | None
) -> None:  # fmt: skip
    with listening() as listener:
        address = listener.getsockname()
        alive += [Rank(listener, 0, 2, at.sum_one, [1.0], tls=tls)]
    wrong = Rank(address, 1, 2, at.sum_one, [5.0], token=b"the key of another generation", tls=tls)
    alive.append(wrong)
    outcome = wrong.outcome()
    assert (outcome.error, outcome.blamed, outcome.operation) == ("ParameterServerError", 0, "forming")
    assert "does not prove that it knows this launch's secret" in outcome.message
    assert "another generation" not in outcome.message  # a key is not for logs
    right = Rank(address, 1, 2, at.sum_one, [2.0], tls=tls)
    alive.append(right)
    assert values([alive[0], right]) == [[3.0], [3.0]]


@pytest.mark.parametrize(
    ("rank", "size", "why"),
    [
        (3, 3, "rank 3 of 3 in a world of 3"),
        (1, 4, "rank 1 of 4 in a world of 3"),
        (2, 3, "rank 2 is already connected"),
    ],
)
def test_a_worker_that_does_not_fit_is_turned_away(alive: list[Rank], rank: int, size: int, why: str) -> None:
    with listening() as listener:
        address = listener.getsockname()
        alive += [Rank(listener, 0, 3, at.sum_one, [1.0]), Rank(address, 2, 3, at.sum_one, [1.0])]
    # Not before rank 2 is in: who is second would be the one that is turned away.
    time.sleep(2)
    odd = Rank(address, rank, size, at.sum_one, [1.0])
    alive.append(odd)
    outcome = odd.outcome()
    assert outcome.error == "ParameterServerError"
    assert why in outcome.message
    alive.append(Rank(address, 1, 3, at.sum_one, [1.0]))
    assert values([alive[0], alive[1], alive[3]]) == [[3.0]] * 3


NONSENSE = {
    "nothing, and leaves": b"",
    "a browser": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a huge size": struct.pack("!Q", 1 << 60),
    "no JSON": struct.pack("!Q", 4) + b"nope",
    "a list": struct.pack("!Q", 2) + b"[]",
    "deep JSON": struct.pack("!Q", 4000) + b"[" * 4000,
    "the right magic, and nonsense": b"dtA1" + bytes(range(256)),
    "half a hello": b"dtA1" + bytes(40),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_at_the_door_keeps_nobody_out(alive: list[Rank], tls: TLSConfig | None, what: str) -> None:
    with listening() as listener:
        address = listener.getsockname()
        alive += [Rank(listener, 0, 2, at.sum_one, [1.0], tls=tls)]
    with socket.create_connection(address) as guest:
        guest.sendall(NONSENSE[what])
        if "leaves" in what or "half" in what:
            guest.close()
        alive.append(Rank(address, 1, 2, at.sum_one, [2.0], tls=tls))
        assert values(alive) == [[3.0], [3.0]]


def test_who_says_nothing_keeps_nobody_out(alive: list[Rank], tls: TLSConfig | None) -> None:
    with listening() as listener:
        address = listener.getsockname()
        alive += [Rank(listener, 0, 2, at.sum_one, [1.0], tls=tls)]
    mute = [socket.create_connection(address) for _ in range(40)]
    alive.append(Rank(address, 1, 2, at.sum_one, [2.0], tls=tls))
    assert values(alive) == [[3.0], [3.0]]
    for guest in mute:
        guest.settimeout(at.PATIENCE)
        assert not guest.recv(1)  # and nobody's connection stays open
        guest.close()


def test_all_hear_of_it_when_one_does_not_come(alive: list[Rank], tls: TLSConfig | None) -> None:
    """Those who came would wait for a minute."""
    with listening() as listener:
        address = listener.getsockname()
        alive += [Rank(listener, 0, 4, at.sum_one, [1.0], forming=4.0, tls=tls)]
    alive += [Rank(address, rank, 4, at.sum_one, [1.0], tls=tls) for rank in (1, 3)]
    server, *workers = outcomes(alive)
    assert (server.error, server.blamed, server.operation) == ("ParameterServerError", 2, "forming"), server
    assert "ranks [2] did not connect to the server within 4 s" in server.message
    for worker in workers:
        assert (worker.error, worker.blamed) == ("ParameterServerError", 2), worker
        assert "ranks [2] did not connect" in worker.message


def test_a_worker_waits_for_a_server_that_is_not_there_yet(alive: list[Rank]) -> None:
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    alive.append(Rank(reserved.getsockname(), 1, 2, at.sum_one, [2.0]))
    time.sleep(1)
    reserved.listen()
    alive.append(Rank(reserved, 0, 2, at.sum_one, [1.0]))
    reserved.close()
    assert values(alive) == [[3.0], [3.0]]


def test_no_server_is_an_error_that_says_where_it_was_looked_for() -> None:
    with listening() as listener:
        address = listener.getsockname()
    with pytest.raises(
        ParameterServerError, match=f"rank 0, the server, cannot be reached at 127.0.0.1:{address[1]} within 1 s"
    ):
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
    worker.sendall(struct.pack("!c16sQ", b"G", b"json", 1 << 46))
    with pytest.raises(
        ParameterServerError, match=r"rank 1 failed in gather after .* it announces 70,368,744,177,664 bytes"
    ):
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
        except ParameterServerError as error:
            results.append(str(error))

    thread = threading.Thread(target=be_server)
    thread.start()
    slow, dying = (bare_worker(address, rank, 3) for rank in (1, 2))
    twos = struct.pack("!c16sQ", b"S", b"float32", 2 * parameter_server.PART_BYTES)
    twos += torch.full((parameter_server.PART_BYTES // 2,), 2.0).numpy().tobytes()
    dying.sendall(twos[: parameter_server.PART_BYTES * 3 // 2])
    slow.sendall(twos[: parameter_server.PART_BYTES * 3 // 2])
    part = b"=" + torch.full((parameter_server.PART_BYTES // 4,), 5.0).numpy().tobytes()
    assert receive(dying, 1 + len(part)) == b"=" + part
    dying.close()  # the server has all of the first part, and waits for the rest of the second one
    heard = receive(slow, 1 << 30)
    slow.close()
    thread.join(at.PATIENCE)
    assert heard[: 1 + len(part)] == b"=" + part
    last_words = heard[1 + len(part) :]
    assert last_words[:1] == b"!"
    assert json.loads(last_words[9:]) == {"rank": 2, "text": results[0]}


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
    worker.sendall(caller.answer(receive(worker, REPLY.size)) + struct.pack("!Q", size))
    return worker


def test_an_error_leaves_no_file_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ParameterServerError):
            ParameterServerGroup.serve(listening(), 3, at.TOKEN, 0.05)
    assert set(os.listdir("/proc/self/fd")) == before
