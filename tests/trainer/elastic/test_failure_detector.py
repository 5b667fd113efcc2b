"""Who is there, as seen over real connections between real processes."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.waiting import until
from trainer.comm.handshake import HELLO, PROOF_BYTES, Listener
from trainer.elastic.failure_detector import FailureDetector
from trainer.elastic.peer import LEAST_GAPS, WINDOW, SignsOfLife, tail_of

NEVER = 1000.0
"""A timeout that no test reaches: what is known before was not found out by waiting."""


class Member:
    """Another process with peers of its own."""

    def __init__(self, name: str, token: str = "token", timeout: float = NEVER, interval: float = 0.1) -> None:
        command = [sys.executable, str(Path(__file__).parents[1] / "peer.py"), name, token, str(interval), str(timeout)]
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.said: list[dict[str, Any]] = []
        assert self.process.stdout is not None
        self.address: tuple[str, int] = tuple(json.loads(self.process.stdout.readline()))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(json.loads(line))  # seen as it comes

    def order(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Starts members as processes (`Member`), or peers in this process (``here=True``)."""
    made: list[Any] = []

    def make(name: str, here: bool = False, timeout: float = NEVER, **more: Any) -> Any:
        if here:
            made.append(FailureDetector(name, more.pop("token", "token").encode(), "127.0.0.1", 0.1, timeout, **more))
        else:
            made.append(Member(name, timeout=timeout, **more))
        return made[-1]

    yield make
    for item in made:
        item.close()


def sees(peers: FailureDetector, **views: str) -> None:
    """Wait until this is how the others look."""
    until(lambda: peers.statuses() == views, peers.statuses)


def test_a_killed_process_is_gone_and_one_that_never_was_too(start: Callable[..., Any]) -> None:
    changes: list[dict[str, str]] = []
    me = start("me", here=True, on_change=lambda: changes.append(dict(me.statuses())))
    other = start("other")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        me.follow({"me": me.address, "other": other.address, "nobody": free.getsockname()})
        sees(me, other="here", nobody="gone")
        assert me.seconds_since_heard()["other"] < 60
        other.signal(signal.SIGKILL)
        sees(me, other="gone", nobody="gone")
    assert [seen.get("other") for seen in changes if seen.get("other") != "unknown"][-1] == "gone"
    assert {"silent"}.isdisjoint(view for seen in changes for view in seen.values())
    me.follow({})
    assert me.statuses() == {}


def test_a_frozen_process_is_silent_after_the_timeout_and_here_again_when_it_goes_on(start: Callable[..., Any]) -> None:
    me, other = start("me", here=True, timeout=1.0), start("other")
    frozen = start("frozen")
    frozen.signal(signal.SIGSTOP)
    me.follow({"other": other.address, "frozen": frozen.address})  # the kernel takes connections for it
    sees(me, other="here", frozen="silent")
    other.signal(signal.SIGSTOP)
    sees(me, other="silent", frozen="silent")
    other.signal(signal.SIGCONT)
    frozen.signal(signal.SIGCONT)
    sees(me, other="here", frozen="here")
    frozen.signal(signal.SIGSTOP)
    sees(me, other="here", frozen="silent")
    frozen.signal(signal.SIGKILL)
    sees(me, other="here", frozen="gone")


def test_one_that_freezes_as_it_admits_this_process_is_silent(start: Callable[..., Any]) -> None:
    me, server = start("me", here=True), socket.create_server(("127.0.0.1", 0))

    def admit_and_say_nothing() -> None:
        held.append(server.accept()[0])
        listener = Listener(b"token", "other")
        held[0].sendall(listener.reply(held[0].recv(HELLO.size, socket.MSG_WAITALL)))
        listener.admit(held[0].recv(PROOF_BYTES, socket.MSG_WAITALL))

    held: list[socket.socket] = []
    thread = threading.Thread(target=admit_and_say_nothing)
    thread.start()
    with server:
        me.follow({"other": server.getsockname()})
        sees(me, other="silent")
        thread.join()
        held[0].close()


def test_a_process_that_was_frozen_itself_accuses_nobody(start: Callable[..., Any]) -> None:
    """The others were silent for longer than the timeout, as it sees it: it was the one that did not listen."""
    sleeper, other = start("sleeper", timeout=1.0), start("other")
    sleeper.order(follow={"other": other.address})
    until(lambda: sleeper.said and sleeper.said[-1]["view"] == {"other": "here"}, lambda: sleeper.said)
    me = start("me", here=True, timeout=2.5)
    me.follow({"sleeper": sleeper.address})
    sees(me, sleeper="here")
    sleeper.signal(signal.SIGSTOP)
    sees(me, sleeper="silent")  # so it slept for more than two of its timeouts
    sleeper.signal(signal.SIGCONT)
    sees(me, sleeper="here")
    other.order(tell={"after": "the sleep"})
    until(lambda: sleeper.said[-1]["messages"], lambda: sleeper.said)
    assert {"silent", "gone"}.isdisjoint(view for item in sleeper.said for view in item["view"].values())


class Stranger:
    """Somebody else's server: takes connections and says always the same."""

    def __init__(self, port: int, answer: bytes) -> None:
        self._server = socket.create_server(("127.0.0.1", port))
        self.answer = answer
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with connection:
                connection.recv(100)
                connection.sendall(self.answer)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"5\n", b"[]\n", b"", b"x" * 100_000])
def test_a_port_that_another_program_has_now_is_nobody(start: Callable[..., Any], answer: bytes) -> None:
    me, other = start("me", here=True), start("other", here=True)
    me.follow({"other": other.address})
    sees(me, other="here")
    other.close()
    stranger = Stranger(other.address[1], answer)
    try:
        sees(me, other="gone")
    finally:
        stranger.close()


def test_another_member_at_the_address_or_one_of_another_job_is_not_the_one(start: Callable[..., Any]) -> None:
    me = start("me", here=True)
    other, foreign = start("other", here=True), start("foreign", here=True, token="another job")
    me.follow({"gone-before": other.address, "foreign": foreign.address, "other": other.address})
    sees(me, **{"gone-before": "gone", "foreign": "gone", "other": "here"})
    foreign.follow({"me": me.address})
    sees(foreign, me="gone")
    with socket.create_connection(me.address) as knock:  # nor does this process mind who knocks
        knock.sendall(b"5\n")
        assert knock.recv(100) == b""
    sees(me, **{"gone-before": "gone", "foreign": "gone", "other": "here"})


def test_a_detector_closes_although_a_cancellation_is_lost(start: Callable[..., Any]) -> None:
    began, lost = threading.Event(), threading.Event()

    async def stubborn() -> None:
        began.set()
        try:
            await asyncio.sleep(NEVER)
        except asyncio.CancelledError:  # as `asyncio.wait_for` of Python 3.11 loses one
            lost.set()
        await asyncio.sleep(NEVER)

    detector = start("a", here=True)
    asyncio.run_coroutine_threadsafe(stubborn(), detector._loop)
    assert began.wait(60)
    detector.close()
    assert lost.is_set()
    assert not detector._thread.is_alive()


def test_messages_reach_all_who_follow_and_are_taken_once(start: Callable[..., Any]) -> None:
    other = start("other", here=True)
    listeners = [start(name, here=True) for name in ("one", "two")]
    for listener in listeners:
        listener.follow({"other": other.address})
        sees(listener, other="here")
    other.broadcast({"regroup": 3})
    other.broadcast({"regroup": 4, "reason": "ü" * 10_000})
    for listener in listeners:
        got: list[dict[str, Any]] = []
        until(lambda got=got, listener=listener: got.extend(listener.take_messages()) or len(got) == 2)  # type: ignore[misc]
        assert [(item["regroup"], item["from"]) for item in got] == [(3, "other"), (4, "other")]
        assert listener.take_messages() == []


def heard(gaps: list[float], expected: float = 0.5) -> SignsOfLife:
    signs, at = SignsOfLife(expected), 100.0
    signs.hear(at)
    for gap in gaps:
        at += gap
        signs.hear(at)
    return signs


def test_suspicion_grows_with_silence_and_ends_with_a_sign():
    signs = heard([0.5] * 20)
    seen = [signs.phi(110.0 + after) for after in (0.0, 0.5, 1.0, 2.0, 4.0)]
    assert seen == sorted(seen)
    assert seen[1] < 1 < 8 < seen[4]
    signs.hear(114.1)
    assert signs.phi(114.2) < 1


def test_a_peer_that_is_often_late_is_waited_for_longer():
    regular, late = heard([0.5] * 50), heard([0.5, 0.5, 0.5, 0.5, 2.5] * 10)
    at = 100.0 + 25.0
    assert regular.phi(at + 3.0) > 12
    assert late.phi(late.heard_at + 3.0) < 4  # type: ignore[operator]
    assert late.phi(late.heard_at + 12.0) > 12  # type: ignore[operator]


def test_an_unknown_past_is_judged_by_what_is_expected():
    assert SignsOfLife(0.5).phi(1e9) == 0.0, "nothing was heard yet"
    few = heard([0.001] * (LEAST_GAPS - 1))
    assert few.phi(few.heard_at + 1.0) < 2  # type: ignore[operator]
    hasty = heard([0.0001] * WINDOW)
    assert hasty.phi(hasty.heard_at + 1.0) < 2, "lines that come together make nobody certain"  # type: ignore[operator]


def test_who_did_not_listen_suspects_nobody():
    signs = heard([0.5] * 20)
    signs.forgive(200.0)
    assert signs.silence(200.5) == 0.5
    assert signs.phi(200.5) < 1
    signs.hear(200.6)
    assert signs.phi(201.0) < 1, "the gap of its own sleep is none of the peer's"


def test_old_gaps_are_forgotten():
    draw = random.Random(1)
    gaps = [draw.uniform(0.4, 0.6) for _ in range(WINDOW)]
    signs = heard([9.0] * 50 + gaps)
    alone = heard(gaps)
    after = signs.heard_at + 2.0  # type: ignore[operator]
    assert signs.phi(after) == pytest.approx(alone.phi(alone.heard_at + 2.0), rel=1e-6)  # type: ignore[operator]


def test_the_tail_is_that_of_the_normal_distribution():
    assert tail_of(0.0) == pytest.approx(0.30103, abs=1e-5)
    assert tail_of(3.0) == pytest.approx(2.8697, abs=1e-3)
    assert tail_of(29.999) == pytest.approx(tail_of(30.001), rel=1e-3)
