"""The process that gives a rank's heartbeats: what the rank may do, and what others then see of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from harness.waiting import until
from trainer.comm.launch_secret import LaunchSecret
from trainer.config import DistributedTrainingConfig
from trainer.elastic.peer_watch import PeerWatch
from trainer.exit_codes import LOST

CONFIG = DistributedTrainingConfig(health_check_seconds=0.1)
RANK = """
import ctypes, json, sys
from trainer.comm.launch_secret import LaunchSecret
from trainer.config import DistributedTrainingConfig
from trainer.elastic.peer_watch import PeerWatch
from trainer.exit_codes import LOST
config = DistributedTrainingConfig(health_check_seconds=0.1, peer_timeout_seconds=float(sys.argv[1]))
peers = PeerWatch("rank", LaunchSecret(b"secret"), "job", "127.0.0.1", "", config)
print(json.dumps(peers.address), flush=True)
for line in sys.stdin:
    if line.startswith("hold"):
        ctypes.PyDLL(None).sleep(int(line.split()[1]))  # with the interpreter's lock
        print("held", flush=True)
    else:
        peers.broadcast(json.loads(line))
"""


@pytest.fixture
def me() -> Iterator[PeerWatch]:
    peers = PeerWatch("me", LaunchSecret(b"secret"), "job", "127.0.0.1", "", CONFIG)
    yield peers
    peers.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    made = []

    def make(timeout: float = 60.0) -> tuple[subprocess.Popen[str], tuple[str, int]]:
        command = [sys.executable, "-c", RANK, str(timeout)]
        rank = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        made.append(rank)
        assert rank.stdout is not None
        host, port = json.loads(rank.stdout.readline())
        return rank, (host, port)

    yield make
    for rank in made:
        rank.kill()
        rank.communicate()


def test_a_rank_that_holds_its_interpreter_is_there_and_one_that_is_stopped_or_killed_is_not(
    me: PeerWatch, start: Callable[..., Any]
) -> None:
    seen: list[str] = []
    rank, address = start()
    me.on_change = lambda: seen.append(me.statuses().get("rank", ""))
    me.follow({"rank": address})
    until(lambda: me.statuses() == {"rank": "here"}, me.statuses)
    rank.stdin.write("hold 2\n")  # four times the silence after which a member counts as lost
    rank.stdin.flush()
    assert rank.stdout.readline() == "held\n"
    assert set(seen) == {"here"}
    rank.stdin.write('{"regroup": 3}\n')
    rank.stdin.flush()
    messages: list[dict[str, Any]] = []
    until(lambda: messages.extend(me.take_messages()) or messages)  # type: ignore[func-returns-value]
    assert messages == [{"regroup": 3, "from": "rank"}]
    rank.send_signal(signal.SIGSTOP)
    until(lambda: me.statuses() == {"rank": "silent"}, me.statuses)
    rank.send_signal(signal.SIGCONT)
    until(lambda: me.statuses() == {"rank": "here"}, me.statuses)
    [watcher] = psutil.Process(rank.pid).children()
    rank.kill()
    until(lambda: me.statuses() == {"rank": "gone"}, me.statuses)
    until(lambda: not watcher.is_running())


def test_a_rank_that_gives_no_sign_of_life_for_the_longest_silence_is_not_there(
    me: PeerWatch, start: Callable[..., Any]
) -> None:
    rank, address = start(timeout=1.0)
    me.follow({"rank": address})
    until(lambda: me.statuses() == {"rank": "here"}, me.statuses)
    rank.stdin.write("hold 60\n")
    rank.stdin.flush()
    until(lambda: me.statuses() == {"rank": "silent"}, me.statuses)


def test_what_was_seen_of_a_member_does_not_count_for_the_next_of_its_name(me: PeerWatch) -> None:
    me._take({"views": {"other": ["gone", 0.0]}, "call": 7})
    assert me.statuses() == {}
    me._calls = 7
    me.follow({"other": ("127.0.0.1", 9)})
    me._take({"views": {"other": ["silent", 0.0]}, "call": 7})
    assert me.statuses()["other"] != "silent"


def test_a_rank_whose_watcher_is_killed_ends_and_a_watcher_ends_only_with_its_rank(start: Callable[..., Any]) -> None:
    rank, _ = start()
    [watcher] = psutil.Process(rank.pid).children()
    for number in (signal.SIGTERM, signal.SIGINT):  # which a scheduler, or a terminal, sends to all processes
        watcher.send_signal(number)
    time.sleep(0.2)
    assert rank.poll() is None
    watcher.kill()
    assert rank.wait(20) == LOST
