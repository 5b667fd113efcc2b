"""A mesh of channels: the same results as gloo, what ends it, who is kept out, small sums; and a star, where it can."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from star_ranks import form
from thread_worlds import at_once, gloo_openers, worlds_of
from torch import Tensor

from trainer.comm import socket_group, torch_transport
from trainer.comm.channel import Channel, PeerError, connect
from trainer.comm.group import GroupError, InterruptibleGroup
from trainer.comm.launch_certificate import LaunchCertificate
from trainer.comm.launch_secret import LaunchSecret
from trainer.comm.socket_group import FAR_BYTES, NEAR_BYTES, MeshGroup, connect_mesh

NEVER, HOST, KEY = 1000.0, "127.0.0.1", b"key"
SECRET, OTHER = LaunchSecret(b"s" * 32), LaunchSecret(b"t" * 32)
SIZES = (0, 1, 5, 1000, 70_001, 600_001)
"""Numbers of a tensor: nothing, fewer than ranks, one exchange, one that is cut into parts of unequal length, several
pieces."""
Places = Sequence[tuple[str, int]]


def listeners(size: int) -> tuple[list[socket.socket], Places]:
    """As many, and where they are."""
    made = [socket.create_server((HOST, 0)) for _ in range(size)]
    return made, [one.getsockname() for one in made]


def join(places: Places, rank: int, listener: socket.socket, timeout: float = 60.0) -> MeshGroup:
    contexts = LaunchCertificate(SECRET, "job")
    return MeshGroup(rank, connect_mesh(places, rank, listener, KEY, timeout, contexts), timeout)


def on_all(ranks: Sequence[Any], action: Callable[[int, Any], Any]) -> list[Any]:
    """The results of an action on all ranks at once, in order of rank."""
    return at_once(lambda pair: action(*pair), list(enumerate(ranks)))


@contextmanager
def mesh_of(size: int, timeout: float = 60.0) -> Iterator[list[MeshGroup]]:
    sockets, places = listeners(size)
    made = on_all(sockets, lambda rank, listener: join(places, rank, listener, timeout))
    try:
        yield made
    finally:
        for one in made:
            one.close()


@pytest.fixture(scope="module", params=[2, 3, 5])
def worlds(request: pytest.FixtureRequest) -> Iterator[tuple[list[MeshGroup], list[Any]]]:
    """The same ranks twice: over the mesh, and over gloo."""
    with mesh_of(request.param) as meshes:
        made = at_once(lambda opener: opener(), gloo_openers(request.param))
        yield meshes, made
        for one in made:
            one.close()


@pytest.fixture(scope="module", params=["mesh", "star"])
def sockets(request: pytest.FixtureRequest, worlds: Any) -> Iterator[list[Any]]:
    """The same ranks over the mesh, and with a parameter server."""
    if request.param == "mesh":
        yield worlds[0]
        return
    size, ([listener], [address]) = len(worlds[0]), listeners(1)
    made = at_once(lambda rank: form(address if rank else listener, rank, size), range(size))
    yield made
    for one in made:
        one.close()


def data(rank: int, numbers: int, kind: torch.dtype = torch.float32) -> Tensor:
    made = torch.Generator().manual_seed(97 * rank + numbers)
    if kind.is_floating_point:
        return torch.randn(numbers, generator=made).to(kind)
    return torch.randint(-1000, 1000, (numbers,), generator=made).to(kind)


def both(worlds: Any, action: Callable[[int, Any], Any]) -> tuple[list[Any], list[Any]]:
    """The results of an action on all ranks, over the mesh and over gloo."""
    return on_all(worlds[0], action), on_all(worlds[1], action)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.int64])
def test_all_reduce(worlds: Any, sockets: Any, kind: torch.dtype) -> None:
    for numbers in SIZES[1:]:  # gloo sums nothing only where there is something

        def add(rank: int, transport: Any, numbers: int = numbers) -> Tensor:
            tensor = data(rank, numbers, kind)
            transport.all_reduce(tensor)
            return tensor

        ours, gloos = on_all(sockets, add), on_all(worlds[1], add)
        assert all(torch.equal(one, ours[0]) for one in ours), "the same bits on all ranks"
        in_order = data(0, numbers, kind)
        for rank in range(1, len(ours)):
            in_order += data(rank, numbers, kind)
        assert torch.equal(ours[0], in_order), "in order of rank"
        assert torch.equal(ours[0], gloos[0]) or kind.is_floating_point
        assert torch.allclose(ours[0], gloos[0], rtol=1e-5, atol=1e-5)
        if len(ours) == 2:
            assert torch.equal(ours[0], gloos[0]), "of two, either order gives the same"


def test_a_tensor_larger_than_a_block(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_group, "BLOCK_BYTES", 1 << 20)
    tensors = [data(rank, 900_001) for rank in range(len(worlds[0]))]
    expected = tensors[0].clone()
    for one in tensors[1:]:
        expected += one
    on_all(worlds[0], lambda rank, transport: transport.all_reduce(tensors[rank]))
    assert all(torch.equal(one, expected) for one in tensors)


def test_tensors_of_other_shapes_types_and_strides(sockets: Any) -> None:
    size, numbers = len(sockets), torch.arange(9.0)

    def make() -> list[Tensor]:
        return [
            torch.arange(12.0).view(3, 4).t(), torch.full((300,), 0.5, dtype=torch.bfloat16), torch.empty(0),
            torch.empty(3, 0, dtype=torch.int64), torch.tensor(2.0), torch.ones(3, requires_grad=True),
            torch.arange(5, dtype=torch.uint8), torch.full((524_289,), 0.5, dtype=torch.float16),
            torch.complex(numbers, 2 * numbers),
        ]  # fmt: skip

    def add(rank: int, transport: Any) -> list[Tensor]:
        tensors = make()
        for tensor in tensors:
            transport.all_reduce(tensor)
        return tensors

    for found in on_all(sockets, add):
        assert all(torch.equal(one, size * once) for one, once in zip(found, make(), strict=True))


def exchange_rows(rank: int, transport: Any, size: int, numbers: int) -> list[Tensor]:
    rows = data(rank, size * numbers).view(size, numbers)
    output, gathered = torch.empty_like(rows), torch.empty_like(rows)
    transport.all_to_all(output, rows)
    transport.all_gather(gathered, rows[0].contiguous())
    return [output, gathered]


def send_and_receive(rank: int, transport: Any, size: int, numbers: int) -> list[Tensor]:
    theirs = torch.zeros(numbers)
    if rank == 0:
        transport.send(data(rank, numbers), size - 1)
        transport.receive(theirs, size - 1)
    elif rank == size - 1:
        transport.receive(theirs, 0)
        transport.send(data(rank, numbers), 0)
    return [theirs]


@pytest.mark.parametrize(("action", "sizes"), [(exchange_rows, (3, 50_000)), (send_and_receive, (40_000,))])
def test_what_is_moved_is_what_gloo_moves(worlds: Any, action: Callable[..., list[Tensor]], sizes: Any) -> None:
    size = len(worlds[0])
    for numbers in sizes:
        ours, gloos = both(worlds, partial(action, size=size, numbers=numbers))
        for mine, theirs in zip(ours, gloos, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("numbers", SIZES)
def test_broadcast(sockets: Any, numbers: int) -> None:
    for source in (0, len(sockets) - 1):

        def copy(rank: int, transport: Any, source: int = source) -> Tensor:
            tensor = data(rank, numbers)
            transport.broadcast(tensor, source)
            return tensor

        assert all(torch.equal(one, data(source, numbers)) for one in on_all(sockets, copy))


def test_objects_and_barriers(sockets: Any) -> None:
    size = len(sockets)

    def talk(rank: int, transport: Any) -> Any:
        transport.barrier(60.0)
        value = {"rank": rank, "text": "«ä» \n" * rank, "none": None, "list": [1.5, rank > 1]}
        return transport.all_gather_object(value), transport.all_gather_object("x" * 3_000_000 * (rank == 1))

    said = [{"rank": rank, "text": "«ä» \n" * rank, "none": None, "list": [1.5, rank > 1]} for rank in range(size)]
    assert on_all(sockets, talk) == [(said, ["x" * 3_000_000 * (rank == 1) for rank in range(size)])] * size


def test_a_sum_within_nodes_first(worlds: Any) -> None:
    size = len(worlds[0])
    nodes = [rank // 2 for rank in range(size)]
    for numbers in (10, 70_001):

        def add(rank: int, transport: Any, numbers: int = numbers) -> Tensor:
            tensor = data(rank, numbers)
            transport.hierarchical_all_reduce(tensor, nodes)
            return tensor

        ours, gloos = both(worlds, add)
        assert all(torch.equal(one, ours[0]) for one in ours)
        assert torch.allclose(ours[0], gloos[0], rtol=1e-5, atol=1e-5)


def test_a_rank_at_another_operation_is_named() -> None:
    def add(mesh: MeshGroup, numbers: int) -> None:
        try:
            mesh.all_reduce(torch.zeros(numbers))
        finally:
            mesh.abort()  # as a group does that has failed

    with mesh_of(2) as (one, other), ThreadPoolExecutor(2) as pool:
        errors = [future.exception(60) for future in (pool.submit(add, one, 5), pool.submit(add, other, 6))]
        assert all(isinstance(error, PeerError) for error in errors)
        assert any(f"rank {1 - rank} is at message" in str(error) for rank, error in enumerate(errors))


@pytest.mark.parametrize("numbers", [1, 3_000_000])
def test_a_peer_that_dies_ends_the_operation_at_once(numbers: int) -> None:
    with mesh_of(3, NEVER) as (one, other, dying), ThreadPoolExecutor(2) as pool:
        going = [pool.submit(mesh.all_reduce, torch.zeros(numbers)) for mesh in (one, other)]
        time.sleep(0.2)
        dying.close()
        for future in going:
            with pytest.raises(PeerError) as told:
                future.result(60)
            assert told.value.rank == 2


@pytest.mark.parametrize("numbers", [1, 3_000_000])
def test_whoever_waits_is_woken_at_once(numbers: int) -> None:
    """On the thread that asks for a small sum, and on the communication thread."""
    with mesh_of(2, NEVER) as (mesh, _silent):
        group = InterruptibleGroup(0, 2, lambda: mesh)
        group.run("start", lambda transport: None)
        timer = threading.Timer(0.3, group.fail, ("it is over",))
        timer.start()
        with pytest.raises(GroupError):
            group.all_reduce("a sum", torch.zeros(numbers)).result()
        group.close()
        group._thread.join(60)
        assert not group._thread.is_alive(), "the communication thread is free as well"


def test_silence_ends_an_operation() -> None:
    with mesh_of(2, 0.3) as (one, _silent), pytest.raises(PeerError, match=r"no data arrived from ranks \[1\] in time"):
        one.all_reduce(torch.zeros(1))
    with mesh_of(2, NEVER) as (one, _silent), pytest.raises(PeerError, match="no data arrived"):
        one.barrier(0.3)


def outcome_of_stranger(stranger: Callable[[tuple[str, int]], Any]) -> Any:
    """What a stranger at rank 0's port gets, while two ranks form a mesh and sum."""
    sockets, places = listeners(2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, places, 0, sockets[0])
        try:
            told = stranger(places[0])
        except (OSError, PeerError) as error:
            told = error
        meshes = [join(places, 1, sockets[1]), first.result(60)]
    tensors = [torch.ones(3), torch.ones(3)]
    on_all(meshes, lambda place, mesh: mesh.all_reduce(tensors[place]))
    assert all(torch.equal(one, torch.full((3,), 2.0)) for one in tensors)
    for mesh in meshes:
        mesh.close()
    return told


@pytest.mark.parametrize(
    ("secret", "key", "word"),
    [
        (OTHER, KEY, "certificate verify failed"),
        (SECRET, b"of another generation", "does not prove that it knows this launch's secret"),
    ],
    ids=["of another launch", "of another generation"],
)
def test_who_lacks_the_certificate_or_the_key_is_refused(secret: LaunchSecret, key: bytes, word: str) -> None:
    contexts = LaunchCertificate(secret, "job")
    told = outcome_of_stranger(lambda at: connect(at, key, "1", "0", contexts, time.monotonic() + 20))
    assert isinstance(told, OSError)
    assert word in str(told)


def test_a_stranger_without_tls_hears_nothing() -> None:
    def shout(at: tuple[str, int]) -> bytes:
        with socket.create_connection(at, 20) as here:
            here.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return here.recv(1000)

    told = outcome_of_stranger(shout)
    assert isinstance(told, ConnectionError) or told[:1] in (b"", b"\x15"), "an alert of TLS, at most"


def test_ranks_that_do_not_come_are_named() -> None:
    sockets, places = listeners(3)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not connect within 0.3 s"):
        join(places, 0, sockets[0], 0.3)
    for one in sockets:
        one.close()


# Small sums beside gloo.


@pytest.mark.parametrize(
    ("size", "hosts", "bytes_"), [(2, 2, NEAR_BYTES), (3, 1, NEAR_BYTES // 2), (3, 2, FAR_BYTES // 2)]
)
def test_what_is_small_depends_on_how_often_it_is_sent_and_how_far(
    size: int, hosts: int, bytes_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a connection: what ranks would sum over."""
    places = [(f"10.0.0.{rank % hosts}", 1) for rank in range(size)]
    listener = socket.create_server((HOST, 0))
    monkeypatch.setattr(torch_transport, "exchange_places", lambda *_: (listener, places))
    ends = [socket.socketpair() for _ in range(size - 1)]
    channels = {rank: Channel(rank, ends[rank - 1][0]) for rank in range(1, size)}
    monkeypatch.setattr(torch_transport, "connect_mesh", lambda *_: channels)

    class Alone:
        def allreduce(self, tensors: list[Tensor]) -> Any:
            tensors[0] *= size
            return self

        def wait(self) -> None: ...

    made = torch_transport._join_small_sums(dist.HashStore(), 0, size, "10.0.0.0", NEVER, Alone(), b"key")
    assert made is not None
    assert made.takes_at_once(torch.empty(bytes_, dtype=torch.uint8))
    assert not made.takes_at_once(torch.empty(bytes_ + 1, dtype=torch.uint8))
    made.close()
    for end in (*(other for _, other in ends), listener):
        end.close()


def test_what_is_there_already_counts_though_it_is_called_off() -> None:
    """And to call it off over and over, with nobody looking, holds nobody up."""
    with mesh_of(2) as (one, other), ThreadPoolExecutor(1) as pool:
        for _ in range(2000):
            one.interrupt()
        tensors = [torch.ones(4), torch.ones(4)]
        going = pool.submit(other.all_reduce, tensors[1])
        time.sleep(0.2)
        one.all_reduce(tensors[0])
        going.result(60)
        assert tensors[0].tolist() == [2.0] * 4
        with pytest.raises(PeerError, match="called off"):
            one.all_reduce(torch.ones(4))


def summed(group: InterruptibleGroup, value: float) -> tuple[float, list[str]]:
    group.run("barrier", lambda transport: transport.barrier(60.0))
    with mock.patch.object(group, "submit", wraps=group.submit) as submit:
        total = group.all_reduce("all-reduce", torch.full((4,), value)).result()
    return total[0].item(), [call.args[0] for call in submit.call_args_list]


def test_a_small_sum_needs_no_other_thread_and_is_noted_like_any() -> None:
    pair: list[Any] = [world.group for world in worlds_of(gloo_openers(2))]
    assert on_all(pair, lambda rank, group: summed(group, rank + 1.0)) == [(3.0, [])] * 2
    latest = pair[0].collectives[-1]
    assert (latest.what, latest.bytes, latest.sequence) == ("all-reduce", 16, 2)
    assert latest.began is not None
    assert latest.ended is not None
    assert latest.submitted <= latest.began <= latest.ended
    assert pair[0].doing[0] == "nothing"
    on_all(pair, lambda _, group: group.close())


def test_where_one_rank_has_no_channels_all_take_the_other_way(caplog: pytest.LogCaptureFixture) -> None:
    real, turns = socket.create_server, iter((True, False))

    def once_without_a_port(*given: Any, **named: Any) -> socket.socket:
        if next(turns):
            raise OSError("there is no port left")
        return real(*given, **named)

    with mock.patch("socket.create_server", once_without_a_port):
        pair: list[Any] = [world.group for world in worlds_of(gloo_openers(2))]
        found = on_all(pair, lambda rank, group: summed(group, rank + 1.0))
    assert found == [(3.0, ["all-reduce"])] * 2
    assert "there is no port left" in caplog.text
    assert "does not listen at any address" in caplog.text
    on_all(pair, lambda _, group: group.close())
