"""Who knocks: real connections, more of them than may be at the door, and than the process has descriptors for."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainer.comm.channel import Channel, _introduce, prepare_socket, run_flows
from trainer.comm.descriptors import raise_descriptor_limit
from trainer.comm.handshake import REPLY, Caller
from trainer.comm.listener import MOST_UNPROVEN, Door
from trainer.elastic.failure_detector import FailureDetector

KEY, PATIENCE = b"key", 60.0
HOST = "127.0.0.1"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0), backlog=1024) as server:
        yield server


def door_at(listener: socket.socket) -> Door[str]:
    return Door(listener, KEY, "here", str)


def knock(connection: socket.socket, key: bytes = KEY) -> None:
    channel = Channel(0, prepare_socket(connection, None, server_side=False))
    run_flows([(channel, _introduce(channel, key, "guest", "here"))], 0.0, time.monotonic() + PATIENCE)


def test_more_than_may_be_unproven_keep_nobody_out_and_the_oldest_go(listener: socket.socket) -> None:
    door = door_at(listener)
    mute = [socket.create_connection(listener.getsockname()) for _ in range(2 * MOST_UNPROVEN)]
    honest = socket.create_connection(listener.getsockname())
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(door.next, time.monotonic() + PATIENCE)
        knock(honest)
        link, name = came.result(PATIENCE)
    assert name == "guest"
    assert mute[0].recv(1) == b"", "it was closed"
    assert any("too many connected at once" in why for why in door.refused) or any(
        "in time" in why for why in door.refused
    )
    door.close()
    for connection in (*mute, honest, link.connection):
        connection.close()


NONSENSE = (
    b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", struct.pack("!Q", 1 << 60), struct.pack("!Q", 4) + b"nope", b"[" * 4000,
    b"dtA1" + bytes(range(256)), b"dtA1" + bytes(40),
)  # fmt: skip


def test_who_has_another_key_or_says_nonsense_or_nothing_is_noted_and_keeps_nobody_out(listener: socket.socket) -> None:
    door, address = door_at(listener), listener.getsockname()
    mute, wrong, *odd = (socket.create_connection(address) for _ in range(2 + len(NONSENSE)))
    for guest, said in zip(odd, NONSENSE, strict=True):
        guest.sendall(said)
    odd[0].close()
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(door.next, time.monotonic() + PATIENCE)
        with pytest.raises(Exception, match="does not prove that it knows this launch's secret"):
            knock(wrong, b"another")
        with socket.create_connection(address) as honest:
            knock(honest)
            link, name = came.result(PATIENCE)
        assert name == "guest"
        with pytest.raises(TimeoutError):
            pool.submit(door.next, time.monotonic() + 2.5).result(PATIENCE)
    assert any("it sent nothing in time" in why for why in door.refused)
    assert not door._guests
    for connection in (mute, wrong, *odd, link.connection):
        connection.close()


@contextlib.contextmanager
def descriptors(left: int) -> Iterator[None]:
    """This process can open so many more, and no others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = list[int]()
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + left, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(left):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)


def test_without_descriptors_the_oldest_at_the_door_makes_room(listener: socket.socket) -> None:
    door = door_at(listener)
    mute = [socket.create_connection(listener.getsockname()) for _ in range(30)]
    honest = socket.create_connection(listener.getsockname())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # its thread is there
        with descriptors(left=3):
            came = pool.submit(door.next, time.monotonic() + PATIENCE)
            knock(honest)
            assert came.result(PATIENCE)[1] == "guest"
    assert any("no file descriptor is left" in why for why in door.refused)
    came.result()[0].connection.close()
    door.close()
    for connection in (*mute, honest):
        connection.close()


def test_without_any_descriptor_nothing_ends_and_who_waits_is_let_in_later(listener: socket.socket) -> None:
    door, peers = door_at(listener), FailureDetector("here", KEY, HOST, 0.1, 1000.0)
    honest, other = (socket.create_connection(address) for address in (listener.getsockname(), peers.address))
    with ThreadPoolExecutor(1) as pool:
        with descriptors(left=0):
            came = pool.submit(door.next, time.monotonic() + PATIENCE)
            time.sleep(0.5)
            assert not came.done()
        knock(honest)
        caller = Caller(KEY, "guest", "here")
        other.sendall(caller.hello)
        other.sendall(caller.answer(other.recv(REPLY.size, socket.MSG_WAITALL)))
        assert came.result(PATIENCE)[1] == "guest"
    other.settimeout(PATIENCE)
    assert other.recv(100) == b'{"member": "here"}\n'
    peers.close()
    for connection in (honest, other, came.result()[0].connection):
        connection.close()


def test_the_limit_of_descriptors_is_raised_as_far_as_it_goes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
