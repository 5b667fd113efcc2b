"""The encrypted mesh: the same results as gloo, what ends it, and who is kept out of it."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mesh_ranks as at
import pytest
import torch
import torch.distributed as dist
from mesh_ranks import listeners, mesh_of, on_all, places_of
from torch import Tensor

from trainer.comm import encrypted_mesh, launch_certificate, mesh_links
from trainer.comm.encrypted_mesh import EncryptedMesh
from trainer.comm.framed_socket import PeerError
from trainer.comm.group import GroupError, InterruptibleGroup
from trainer.comm.launch_certificate import LaunchCertificate
from trainer.comm.launch_secret import LaunchSecret
from trainer.comm.torch_transport import TorchTransport, make_torch_transport
from trainer.observability.comm_profiler import links, time_links

NEVER = 1000.0
SIZES = (0, 1, 5, 1000, 70_001, 600_001)
"""Numbers of a tensor: nothing, fewer than ranks, one exchange, one that is cut into parts of unequal length, several
pieces."""


@pytest.fixture(scope="module", params=[2, 3, 5])
def worlds(request: pytest.FixtureRequest) -> Iterator[tuple[list[EncryptedMesh], list[TorchTransport]]]:
    """The same ranks twice: over the mesh, and over gloo."""
    size, store = request.param, dist.HashStore()
    with mesh_of(size) as meshes:
        made = on_all(
            meshes,
            lambda rank, _: make_torch_transport(
                store, rank, size, None, 60.0, 60.0, at.HOST, close_store=lambda: None
            ),
        )
        yield meshes, made
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
def test_all_reduce(worlds: Any, kind: torch.dtype) -> None:
    for numbers in SIZES[1:]:  # gloo sums nothing only where there is something

        def add(rank: int, transport: Any, numbers: int = numbers) -> Tensor:
            tensor = data(rank, numbers, kind)
            transport.all_reduce(tensor)
            return tensor

        ours, gloos = both(worlds, add)
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
    monkeypatch.setattr(encrypted_mesh, "BLOCK_BYTES", 1 << 20)
    tensors = [data(rank, 900_001) for rank in range(len(worlds[0]))]
    expected = tensors[0].clone()
    for one in tensors[1:]:
        expected += one
    on_all(worlds[0], lambda rank, transport: transport.all_reduce(tensors[rank]))
    assert all(torch.equal(one, expected) for one in tensors)


def test_tensors_of_other_shapes_types_and_strides(worlds: Any) -> None:
    size = len(worlds[0])

    def add(rank: int, transport: Any) -> list[Tensor]:
        turned = torch.arange(12.0).view(3, 4).t()
        half, empty, lone = torch.full((300,), 0.5, dtype=torch.bfloat16), torch.empty(0), torch.tensor(2.0)
        needed = torch.ones(3, requires_grad=True)
        for tensor in (turned, half, empty, lone, needed):
            transport.all_reduce(tensor)
        return [turned, half, empty, lone, needed.detach()]

    for turned, half, empty, lone, needed in on_all(worlds[0], add):
        assert torch.equal(turned, size * torch.arange(12.0).view(3, 4).t())
        assert torch.equal(half, torch.full((300,), 0.5 * size, dtype=torch.bfloat16))
        assert (len(empty), lone.item()) == (0, 2.0 * size)
        assert torch.equal(needed, torch.full((3,), float(size)))


def test_broadcast(worlds: Any) -> None:
    size = len(worlds[0])
    for numbers in SIZES:
        for source in (0, size - 1):

            def copy(rank: int, transport: Any, numbers: int = numbers, source: int = source) -> Tensor:
                tensor = data(rank, numbers)
                transport.broadcast(tensor, source)
                return tensor

            ours, gloos = both(worlds, copy)
            assert all(torch.equal(one, data(source, numbers)) for one in [*ours, *gloos])


@pytest.mark.parametrize("block", [encrypted_mesh.BLOCK_BYTES, 4096])
def test_parts_of_the_ranks_gather_and_sum_by_themselves(
    worlds: Any, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """All ranks, then those with an even and an odd number side by side, as replicas of a shared model do."""
    monkeypatch.setattr(encrypted_mesh, "BLOCK_BYTES", block)
    size = len(worlds[0])
    for numbers in (1, 50_000):
        for step in (1, 2):

            def take_part(rank: int, transport: Any, numbers: int = numbers, step: int = step) -> list[Tensor]:
                ranks = list(range(rank % step, size, step))
                place = ranks.index(rank)
                gathered = torch.zeros(len(ranks) * numbers)
                mine = gathered[place * numbers : (place + 1) * numbers]  # as FSDP2 gives it
                mine.copy_(data(rank, numbers))
                transport.gather_among(gathered, mine, ranks)
                rows = torch.empty(numbers)
                transport.scatter_sum(rows, data(rank, len(ranks) * numbers), ranks)
                total = data(rank, numbers)
                transport.sum_among(total, ranks)
                return [gathered, rows, total]

            ours, gloos = both(worlds, take_part)
            for rank, (mine, theirs) in enumerate(zip(ours, gloos, strict=True)):
                assert torch.equal(mine[0], theirs[0])
                assert torch.allclose(mine[1], theirs[1], rtol=1e-5, atol=1e-5)
                assert torch.allclose(mine[2], theirs[2], rtol=1e-5, atol=1e-5)
                assert torch.equal(mine[2], ours[rank % step][2]), "the same bits on all ranks that sum"


def test_rows(worlds: Any) -> None:
    size = len(worlds[0])
    for numbers in (3, 50_000):

        def exchange(rank: int, transport: Any, numbers: int = numbers) -> Tensor:
            rows = data(rank, size * numbers).view(size, numbers)
            output = torch.empty_like(rows)
            transport.all_to_all(output, rows)
            gathered = torch.empty_like(rows)
            transport.all_gather(gathered, rows[0].contiguous())
            return torch.stack([output, gathered])

        ours, gloos = both(worlds, exchange)
        assert all(torch.equal(one, other) for one, other in zip(ours, gloos, strict=True))


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


def test_objects_messages_and_barriers(worlds: Any) -> None:
    size = len(worlds[0])

    def talk(rank: int, transport: Any) -> Any:
        transport.barrier(60.0)
        found = transport.all_gather_object({"rank": rank, "text": "x" * 3000 * rank})
        mine, theirs = data(rank, 40_000), torch.empty(40_000)
        if rank == 0:
            transport.send(mine, size - 1)
            transport.receive(theirs, size - 1)
        elif rank == size - 1:
            transport.receive(theirs, 0)
            transport.send(mine, 0)
        return found, theirs if rank in (0, size - 1) else None

    ours, gloos = both(worlds, talk)
    for (found, theirs), (expected, others) in zip(ours, gloos, strict=True):
        assert found == expected
        assert theirs is others is None or torch.equal(theirs, others)


def test_links_are_probed_as_with_gloo(worlds: Any) -> None:
    size = len(worlds[0])
    for bytes_, seconds, took in on_all(worlds[0], lambda rank, mesh: time_links(mesh, rank, size)):
        assert bytes_ > 0
        assert len(seconds) == len(links(size))
        assert took > 0


def test_keys_are_renewed_between_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a number of records both ends make a new handshake on the same connection, wherever either of them is."""
    renewed: list[int] = []
    renew = mesh_links.MeshLink.renew

    def note(link: mesh_links.MeshLink, contexts: Any) -> Any:
        renewed.append(link.peer)
        return renew(link, contexts)

    monkeypatch.setattr(mesh_links.MeshLink, "renew", note)
    monkeypatch.setattr(mesh_links, "MOST_RECORDS", 20)
    with mesh_of(3) as meshes:

        def work(rank: int, mesh: EncryptedMesh) -> Tensor:
            tensor = data(rank, 30_000)
            for number in range(12):
                mesh.all_reduce(tensor)
                mesh.broadcast(tensor, number % 3)
                tensor /= 3
            return tensor

        found = on_all(meshes, work)
        assert all(torch.equal(one, found[0]) for one in found)
        assert {link.connection.version() for mesh in meshes for link in mesh._links.values()} == {"TLSv1.3"}
    assert len(renewed) > 3 * 2 * 3
    assert len(renewed) % 2 == 0, "always both ends"


def test_a_rank_at_another_operation_is_named() -> None:
    def add(mesh: EncryptedMesh, numbers: int) -> None:
        try:
            mesh.all_reduce(torch.zeros(numbers))
        finally:
            mesh.abort()  # as a group does that has failed

    with mesh_of(2) as (one, other), ThreadPoolExecutor(2) as pool:
        errors = [future.exception(60) for future in (pool.submit(add, one, 5), pool.submit(add, other, 6))]
        assert all(isinstance(error, PeerError) for error in errors)
        assert any(f"rank {1 - rank} is at operation 1" in str(error) for rank, error in enumerate(errors))


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
    with mesh_of(2, NEVER) as (one, _silent), pytest.raises(PeerError, match="nothing came"):
        one.barrier(0.3)


def outcome_of_stranger(stranger: Callable[[list[Any]], Any]) -> Any:
    """What a stranger at rank 0's port gets, while two ranks form a mesh and sum."""
    sockets = listeners(2)
    places = places_of(sockets)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(at.join, places, 0, sockets[0])
        met = pool.submit(stranger, places)
        try:
            told = met.result(60)
        except (OSError, PeerError) as error:
            told = error
        meshes = [pool.submit(at.join, places, 1, sockets[1]).result(60), first.result(60)]
    tensors = [torch.ones(3), torch.ones(3)]
    on_all(meshes, lambda place, mesh: mesh.all_reduce(tensors[place]))
    assert all(torch.equal(one, torch.full((3,), 2.0)) for one in tensors)
    for mesh in meshes:
        mesh.close()
    return told


def reach_as_1(places: Any, contexts: Any, key: bytes = at.KEY) -> Any:
    return mesh_links._reach(places[0], contexts, key, 1, 0, time.monotonic() + 20)


def test_a_certificate_of_another_launch_is_refused() -> None:
    theirs = LaunchCertificate(LaunchSecret(b"t" * 32), "job")
    told = outcome_of_stranger(lambda places: reach_as_1(places, theirs))
    assert isinstance(told, OSError)
    assert "certificate verify failed" in str(told)


def test_a_member_s_certificate_without_the_key_of_the_generation_is_refused() -> None:
    mine = LaunchCertificate(at.SECRET, "job")
    told = outcome_of_stranger(lambda places: reach_as_1(places, mine, b"of another generation"))
    assert isinstance(told, OSError)
    assert "does not prove that it knows this launch's secret" in str(told)


def test_a_stranger_without_tls_hears_nothing() -> None:
    def shout(places: Any) -> bytes:
        with socket.create_connection(places[0], 20) as here:
            here.sendall(b"GET / HTTP/1.0\r\n\r\n")
            here.settimeout(20)
            return here.recv(1000)

    told = outcome_of_stranger(shout)
    assert isinstance(told, OSError) or len(told) < 10  # an alert of TLS


def test_an_impersonator_at_a_rank_s_port_is_refused() -> None:
    """It has a certificate that it signed itself, and lets everybody in."""
    key = launch_certificate.derive_authority_key(LaunchSecret(b"t" * 32), "job")
    [mine, trap] = listeners(2)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority = launch_certificate._make_authority(key)
    launch_certificate.load_key(server, *launch_certificate.issue_certificate(key, authority))

    def serve() -> None:
        with trap.accept()[0] as there:
            there.settimeout(20)
            with pytest.raises(ssl.SSLError):
                server.wrap_socket(there, server_side=True).recv(1)

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve)
        with pytest.raises(OSError, match="certificate verify failed"):
            at.join([trap.getsockname(), mine.getsockname()], 1, mine, 20.0)
        serving.result(60)
    trap.close()


def test_ranks_that_do_not_come_are_named() -> None:
    sockets = listeners(3)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not connect within 0.3 s"):
        at.join(places_of(sockets), 0, sockets[0], 0.3)
    for one in sockets:
        one.close()
