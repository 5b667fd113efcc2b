"""The store of a world: what torch asks of one, and who may ask."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from trainer.comm.handshake import AuthenticationError
from trainer.comm.launch_certificate import LaunchCertificate
from trainer.comm.launch_secret import LaunchSecret
from trainer.comm.rendezvous_store import AuthenticatedStore
from trainer.comm.static_rendezvous import open_listener

KEY, PATIENCE = b"key", 60.0


@pytest.fixture
def served() -> Iterator[AuthenticatedStore]:
    listener = open_listener("127.0.0.1")
    store = AuthenticatedStore(listener.getsockname(), 0, 3, KEY, PATIENCE, listener)
    yield store
    store.close()


def address(store: AuthenticatedStore) -> tuple[str, int]:
    return store._connection.getpeername()


@pytest.fixture
def other(served: AuthenticatedStore) -> Iterator[AuthenticatedStore]:
    store = AuthenticatedStore(address(served), 1, 3, KEY, PATIENCE)
    yield store
    store.close()


def test_it_does_what_torchs_own_does(served: AuthenticatedStore, other: AuthenticatedStore) -> None:
    """The same calls, side by side, by way of C++ as gloo makes them, and directly."""
    torchs = dist.HashStore()
    for one, two in ((torchs, torchs), (served, other), (dist.PrefixStore("a", served), dist.PrefixStore("a", other))):
        one.set("key", "value")
        assert two.get("key") == b"value"
        two.set("empty", "")
        assert one.get("empty") == b""
        assert (one.add("count", 3), two.add("count", -4)) == (3, -1)
        assert one.get("count") == b"-1"
        assert two.compare_set("swap", "", "first") == b"first"
        assert one.compare_set("swap", "other", "second") == b"first"
        assert one.compare_set("swap", "first", "second") == b"second"
        assert one.compare_set("not there", "other", "second") == b"other"
        assert two.check(["key", "count"])
        assert not two.check(["key", "nothing"])
        one.wait(["key", "count"])
        one.append("list", "a")
        two.append("list", "b")
        assert one.get("list") == b"ab"
        assert one.multi_get(["key", "list"]) == [b"value", b"ab"]
        one.multi_set(["m1", "m2"], ["1", "2"])
        assert two.multi_get(["m1", "m2"]) == [b"1", b"2"]
        assert one.delete_key("key")
        assert not two.delete_key("key")
    assert served.num_keys() == other.num_keys() > 0


def test_who_asks_for_what_is_not_there_yet_waits_for_it(served: AuthenticatedStore, other: AuthenticatedStore) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(other.get, "late")
        again = pool.submit(other.set, "meanwhile", "x")  # another thread of the same rank is not held up
        assert served.get("meanwhile") == b"x"
        again.result(PATIENCE)
        served.set("late", b"\0\xff")
        assert waiting.result(PATIENCE) == b"\0\xff"


def test_what_never_comes_is_an_error_of_torchs_kind(served: AuthenticatedStore) -> None:
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0.1 s.*never"):
        served.wait(["never"], timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match="never"):
        dist.PrefixStore("p", served).wait(["never"], timedelta(seconds=0.1))
    served.set_timeout(timedelta(seconds=0.1))
    assert served.timeout == timedelta(seconds=0.1)
    with pytest.raises(dist.DistStoreError):
        served.get("never")


def test_closing_it_ends_every_wait_on_all_ranks(served: AuthenticatedStore, other: AuthenticatedStore) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(store.get, "never") for store in (served, other)]
        time.sleep(0.2)
        served.close()
        for future in waiting:
            with pytest.raises(dist.DistStoreError):
                future.result(PATIENCE)
    with pytest.raises(dist.DistStoreError, match="is closed"):
        served.set("key", "value")


def test_nobody_gets_in_with_another_key_or_as_a_rank_that_is_not(served: AuthenticatedStore) -> None:
    with pytest.raises(AuthenticationError, match="does not prove that it knows this launch's secret"):
        AuthenticatedStore(address(served), 1, 3, b"another generation's", PATIENCE)
    with pytest.raises(ConnectionRefusedError, match="claims to be rank '3' in a world of 3"):
        AuthenticatedStore(address(served), 3, 3, KEY, PATIENCE)  # it has proven the key
    assert served.num_keys() == 0


def test_a_stranger_at_its_address_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(AuthenticatedStore, stranger.getsockname(), 1, 2, KEY, PATIENCE)
        connection, _ = stranger.accept()
        connection.sendall(b"dtA1" + bytes(64))
        with pytest.raises(AuthenticationError, match=r"the process at 127.0.0.1:\d+ does not prove"):
            asking.result(PATIENCE)
        connection.close()


def test_nobody_there_is_said_with_the_address() -> None:
    with open_listener("127.0.0.1") as listener:
        where = listener.getsockname()
    with pytest.raises(ConnectionError, match=f"127.0.0.1:{where[1]} cannot be reached"):
        AuthenticatedStore(where, 1, 2, KEY, 0.2)


def test_the_same_over_tls_and_nobody_without_the_launch_s_certificate() -> None:
    mine = LaunchCertificate(LaunchSecret(b"s" * 32), "job")
    listener = open_listener("127.0.0.1")
    served = AuthenticatedStore(listener.getsockname(), 0, 3, KEY, PATIENCE, listener, mine)
    other = AuthenticatedStore(address(served), 1, 3, KEY, PATIENCE, tls=mine)
    served.set("key", "value")
    assert other.get("key") == b"value"
    theirs = LaunchCertificate(LaunchSecret(b"t" * 32), "job")
    for contexts in (None, theirs):
        with pytest.raises(ConnectionError, match=r"are training.encryption and training.tls the same on all nodes"):
            AuthenticatedStore(address(served), 2, 3, KEY, 0.5, tls=contexts)
    other.close()
    served.close()
