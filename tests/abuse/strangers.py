"""Strangers on the same host: processes of another user, without the secret of the launch, at every port of a job.

`attack` takes the parts of a world one by one (failure detector, store, parameter server, peer-to-peer connections,
gloo) and lets a stranger speak to each: with the messages of protocols that trusted everyone who knew a job's id, with
a handshake that is recorded, reflected, cut or made up, and with more connections than there are descriptors.
Afterwards the members must still be able to join, and no stranger may have had an answer."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.abuse.stranger import JOB, Stranger, besiege, stranger
from tests.abuse.tally import Tally
from trainer.comm.channel import PeerError
from trainer.comm.handshake import PROOF_BYTES, REPLY, AuthenticationError, Caller, Listener
from trainer.comm.launch_secret import SECRET_BYTES, LaunchSecret
from trainer.comm.parameter_server import ParameterServerGroup
from trainer.comm.rendezvous_store import AuthenticatedStore
from trainer.comm.socket_group import MeshGroup, connect_mesh, exchange_places
from trainer.comm.static_rendezvous import open_listener
from trainer.comm.torch_transport import make_torch_transport
from trainer.elastic.failure_detector import FailureDetector

HOST = "127.0.0.1"
PATIENCE = 120.0
"""Seconds that those who belong there are given. 30 were once too few, on a loaded machine: a kernel whose backlog is
full drops a connection's first packet, and the sender repeats it after 1, 3, 7, 15 and 31 seconds."""


def attack(random: random.Random, rounds: int) -> Tally:
    """Let a stranger attack all parts of a world, and try ``rounds`` forged handshakes of each kind."""
    tally, secret = Tally(), LaunchSecret(random.randbytes(SECRET_BYTES))
    forge(tally, random, rounds, secret.key("peer_to_peer", JOB, 1))
    with stranger() as who:
        for part in (detector, store, parameter_server, peer_to_peer):
            part(tally, who, secret)
            who.does("drop")
    for part in (place_in_gloo, place_in_store, place_in_star):
        part(tally, random, secret)
    return tally


# Forged handshakes.


def forge(tally: Tally, random: random.Random, rounds: int, key: bytes) -> None:
    """Try each kind of forgery that needs no key, against both ends."""
    kinds: dict[str, Callable[[], Any]] = {
        "a proof recorded before": lambda: _replayed(key),
        "a reply recorded before": lambda: Caller(key, "2", "0").answer(Listener(key, "0").reply(_hello(key))),
        "a reflected challenge": lambda: Caller(key, "2", "0").answer(Listener(key, "2").reply(_hello(key, "0"))),
        "the place of another rank": lambda: _between(key, key, "2", "0", "1"),
        "another generation": lambda: _between(key, LaunchSecret(key).key("peer_to_peer", JOB, 2), "2", "0", "0"),
        "no secret at all": lambda: _between(key, LaunchSecret().key("peer_to_peer", JOB, 1), "2", "0", "0"),
        "a bit that changed": lambda: _changed(key, random, lambda text: _flip(text, random)),
        "a message that is cut": lambda: _changed(key, random, lambda text: text[: random.randrange(len(text))]),
        "a message with more": lambda: _changed(key, random, lambda text: text + random.randbytes(1 << 12)),
    }
    for name, kind in kinds.items():
        for _ in range(rounds):
            tally.tried += 1
            try:
                kind()
            except AuthenticationError:
                continue
            tally.accepted += 1
            tally.findings.append(f"a handshake accepted {name}")


def _hello(key: bytes, other: str = "0") -> bytes:
    return Caller(key, "2", other).hello


def _replayed(key: bytes) -> None:
    caller, listener = Caller(key, "2", "0"), Listener(key, "0")
    proof = caller.answer(listener.reply(caller.hello))
    again = Listener(key, "0")
    again.reply(caller.hello)
    again.admit(proof)


def _between(one: bytes, other: bytes, me: str, wanted: str, there: str) -> None:
    caller, listener = Caller(one, me, wanted), Listener(other, there)
    listener.admit(caller.answer(listener.reply(caller.hello)))


def _changed(key: bytes, random: random.Random, change: Callable[[bytes], bytes]) -> None:
    which, caller, listener = random.randrange(3), Caller(key, "2", "0"), Listener(key, "0")
    hello = change(caller.hello) if which == 0 else caller.hello
    reply = listener.reply(hello)
    proof = caller.answer(change(reply) if which == 1 else reply)
    listener.admit(change(proof) if which == 2 else proof)


def _flip(text: bytes, random: random.Random) -> bytes:
    changed, place = bytearray(text), random.randrange(8 * len(text))
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


# Attacks on the parts of a world.


def _note(tally: Tally, what: str, answers: list[Any], works: Callable[[], bool]) -> None:
    """Count the answers that the stranger got, and check that the part still works."""
    tally.tried += 1
    for port, words, said in answers:
        if _is_reply(said):
            continue  # every listener answers a well-formed hello so: a challenge, and a proof of its own
        tally.accepted += 1
        tally.findings.append(f"{what} at port {port} answered {words[:80]} with {said[:80]}")
    try:
        fine = works()
    except Exception as error:
        fine = False
        tally.findings.append(f"{what}: {type(error).__name__}: {error}")
    if not fine:
        tally.outages += 1
        tally.findings.append(f"{what} no longer works for those who belong there")


def _is_reply(said: str) -> bool:
    return len(said) == 2 * REPLY.size and said.startswith(b"dtA1".hex())


def detector(tally: Tally, who: Stranger, secret: LaunchSecret) -> None:
    """Attack the failure detector: a stranger that was let in could pose as a member, or keep this one busy."""
    key = secret.key("peers", JOB)
    one = FailureDetector("n0p0-a", key, HOST, 0.1, 1000.0)
    other = None
    try:
        answers = besiege(who, [one.address[1]], ["n0p0-a", "n1p0-b"])
        other = FailureDetector("n1p0-b", key, HOST, 0.1, 1000.0)
        other.follow({"n0p0-a": one.address})

        def works() -> bool:
            assert other is not None
            _until(lambda: other.statuses() == {"n0p0-a": "here"})
            one.broadcast({"regroup": 1})
            _until(lambda: bool(other.take_messages()))
            return other.statuses() == {"n0p0-a": "here"} and not one.take_messages()

        _note(tally, "the failure detector", answers, works)
    finally:
        for peers in (one, other):
            if peers is not None:
                peers.close()


def store(tally: Tally, who: Stranger, secret: LaunchSecret) -> None:
    """Attack the store: a stranger that was let in could read and forge the addresses that ranks connect to."""
    listener, key = open_listener(HOST), secret.key("store", JOB, 1)
    address = listener.getsockname()
    served = AuthenticatedStore(address, 0, 3, key, PATIENCE, listener)
    try:
        served.set("0", "honest")
        answers = besiege(who, [address[1]], ["0", "1", "store"])

        def works() -> bool:
            late = AuthenticatedStore(address, 1, 3, key, PATIENCE)
            late.set("1", "too")
            return served.multi_get(["0", "1"]) == [b"honest", b"too"] and served.num_keys() == 2

        _note(tally, "the store", answers, works)
    finally:
        served.close()


def parameter_server(tally: Tally, who: Stranger, secret: LaunchSecret) -> None:
    """Attack the parameter server: numbers of a stranger that was let in would be summed."""
    listener, key = open_listener(HOST), secret.key("star", JOB, 1)
    address = listener.getsockname()
    with ThreadPoolExecutor(2) as pool:
        forming = pool.submit(ParameterServerGroup.serve, listener, 2, key, PATIENCE)
        answers = besiege(who, [address[1]], ["0", "1", "server"])

        def works() -> bool:
            return _sums([forming.result, lambda: ParameterServerGroup.connect_worker(address, 1, 2, key, PATIENCE)])

        _note(tally, "the parameter server", answers, works)


def peer_to_peer(tally: Tally, who: Stranger, secret: LaunchSecret) -> None:
    """Attack peer-to-peer connections: a stranger comes to each port as soon as it is known."""
    key, answers = secret.key("peer_to_peer", JOB, 1), list[Any]()

    class Told(dist.HashStore):
        def set(self, name: str, value: str) -> None:
            super().set(name, value)
            port = json.loads(value)[1]
            if name == "0":
                who.does("flood", ports=[port], count=500)
                answers.extend(who.does("hello", ports=[port], names=["1"], recorded="cd" * PROOF_BYTES))

    told = Told()

    def join(rank: int) -> MeshGroup:
        listener, places = exchange_places(told, rank, 2, HOST)
        return MeshGroup(rank, connect_mesh(places, rank, listener, key, PATIENCE), PATIENCE)

    openers = [partial(join, rank) for rank in range(2)]
    _note(tally, "peer-to-peer connections", answers, lambda: _sums(openers))


# A stranger in the place of a rank, which runs this very code without the key.


def place_in_gloo(tally: Tally, random: random.Random, secret: LaunchSecret) -> None:
    """Take the place of a rank in gloo, without the key: the stranger has guessed the addresses, and is faster than the
    rank."""
    found, key = dist.HashStore(), secret.key("world", JOB, 1)
    keys = [key, random.randbytes(32)]
    openers = [
        lambda rank=rank: make_torch_transport(found, rank, 2, None, PATIENCE, PATIENCE, HOST, key=keys[rank])
        for rank in range(2)
    ]
    _refused(tally, "gloo", openers)


def place_in_store(tally: Tally, random: random.Random, secret: LaunchSecret) -> None:
    """Take the place of a rank at the store, without the key."""
    listener, key = open_listener(HOST), secret.key("store", JOB, 1)
    address = listener.getsockname()
    served = AuthenticatedStore(address, 0, 2, key, PATIENCE, listener)
    try:
        _refused(tally, "the store", [lambda: AuthenticatedStore(address, 1, 2, random.randbytes(32), PATIENCE)])
    finally:
        served.close()


def place_in_star(tally: Tally, random: random.Random, secret: LaunchSecret) -> None:
    """Take the place of a worker at the parameter server, without the key."""
    listener, key = open_listener(HOST), secret.key("star", JOB, 1)
    address = listener.getsockname()
    _refused(
        tally, "the parameter server",
        [
            lambda: ParameterServerGroup.serve(listener, 2, key, 2.0),
            lambda: ParameterServerGroup.connect_worker(address, 1, 2, random.randbytes(32), PATIENCE),
        ],
    )  # fmt: skip


def _refused(tally: Tally, what: str, openers: Sequence[Callable[[], Any]]) -> None:
    """Check that none of these connections comes to be."""
    tally.tried += 1
    made = []
    for future in _at_once(openers):
        with contextlib.suppress(AuthenticationError, PeerError):
            made.append(future.result(PATIENCE))
    for thing in made:
        thing.close()
    if made:
        tally.accepted += 1
        tally.findings.append(f"{what} took a stranger for a rank")


def _sums(openers: Sequence[Callable[[], Any]]) -> bool:
    """Return whether these ranks, each from its opener, compute the right sum."""
    links = [future.result(PATIENCE) for future in _at_once(openers)]
    tensors = [torch.full((8,), rank + 1.0) for rank in range(len(links))]
    try:
        for future in _at_once([lambda rank=rank: links[rank].all_reduce(tensors[rank]) for rank in range(len(links))]):
            future.result(PATIENCE)
    finally:
        for link in links:
            link.close()
    total = sum(range(1, len(links) + 1))
    return all(tensor.tolist() == [total] * 8 for tensor in tensors)


def _at_once(actions: Sequence[Callable[[], Any]]) -> list[Future[Any]]:
    with ThreadPoolExecutor(len(actions)) as pool:
        return [pool.submit(action) for action in actions]


def _until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > until:
            raise TimeoutError("it did not come about")
        time.sleep(0.01)
