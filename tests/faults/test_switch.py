"""The switch, with real sockets between namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.faults.network import Network
from harness.faults.switch import QUEUE_BYTES, Link

ROOT = str(Path(__file__).parents[2])
PORT = 9077
# One end of a connection, in a namespace of its own: answers lines, and counts bytes.
_PROGRAM = """
import json, select, socket, sys, time
sys.path.insert(0, sys.argv[1])
from harness.faults import switch
switch.enter(sys.argv[2])
if sys.argv[3] == "serve":
    listener = socket.create_server((sys.argv[4], int(sys.argv[5])))
    print("ready", flush=True)
    peer, _ = listener.accept()
else:
    peer = socket.create_connection((sys.argv[4], int(sys.argv[5])), 10)
    print("ready", flush=True)
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
stream = peer.makefile("rwb")
for line in sys.stdin:
    order = json.loads(line)
    answer = {}
    if order["do"] == "ping":
        peer.settimeout(order["timeout"])
        began = time.monotonic()
        try:
            peer.sendall(order["token"].encode() + b"\\n")
            heard = b""  # perhaps with an earlier one in front, that was long on its way
            while order["token"].encode() not in heard:
                heard += peer.recv(1000)
            answer = {"seconds": time.monotonic() - began}
        except TimeoutError:
            answer = {"seconds": None}
    elif order["do"] == "echo":
        peer.settimeout(60)
        while sys.stdin not in select.select([sys.stdin, peer], [], [])[0]:  # the next order ends it
            peer.sendall(peer.recv(1000))
    elif order["do"] == "send":
        peer.settimeout(60)
        peer.sendall(bytes(order["bytes"]))
    elif order["do"] == "receive":
        peer.settimeout(60)
        left, began, size = order["bytes"], None, 0
        while left:
            size = len(peer.recv(1 << 16))
            began = began or time.monotonic()
            left -= size
        answer = {"seconds": time.monotonic() - began}
    print(json.dumps(answer), flush=True)
"""


class End:
    """A process in a namespace that has one end of a connection."""

    def __init__(self, network: Network, host: int, role: str, server: int) -> None:
        where = [ROOT, network.namespaces[host], role, network.address(server), str(PORT)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if role == "serve":
            self.ready()

    def ready(self) -> None:
        assert self.process.stdout
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, **order: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def ends(network: Network) -> Iterator[tuple[End, End]]:
    """A connection from host 0 to host 1, both ends."""
    server = End(network, 1, "serve", 1)
    client = End(network, 0, "connect", 1)
    client.ready()
    yield client, server
    for end in (client, server):
        end.process.kill()
        end.process.communicate()


def ping(ends: tuple[End, End], timeout: float = 1.0) -> float | None:
    """Seconds of a round trip, the best of three; None if nothing came back."""
    client, server = ends
    server.ask(do="echo")
    tries = []
    for _ in range(3):
        client.ask(do="ping", token=f"{time.monotonic()}", timeout=timeout)
        tries.append(client.answer()["seconds"])
        if tries[-1] is None:
            break
    server.ask(do="nothing")
    for _ in range(2):
        server.answer()
    return min((seconds for seconds in tries if seconds is not None), default=None)


def transfer(ends: tuple[End, End], size: int) -> float:
    """Bytes per second from host 0 to host 1."""
    client, server = ends
    server.ask(do="receive", bytes=size)
    client.ask(do="send", bytes=size)
    client.answer()
    return size / server.answer()["seconds"]


def test_a_delayed_link_answers_later_by_the_delay(network: Network, ends: tuple[End, End]) -> None:
    before = ping(ends)
    network.delay(0, 1, 0.15)
    both_ways = ping(ends)
    network.delay(0, 1, 0.15, one_way=True)
    network.restore(0, 1)
    network.delay(0, 1, 0.2, one_way=True)
    one_way = ping(ends)
    assert before is not None
    assert both_ways is not None
    assert one_way is not None
    assert before < 0.3 <= both_ways
    assert one_way >= 0.2


def test_a_throttled_link_carries_no_more_than_it_may(network: Network, ends: tuple[End, End]) -> None:
    free = transfer(ends, 4_000_000)
    network.throttle(0, 1, 1_000_000)
    throttled = transfer(ends, 2_000_000)
    network.restore(0, 1)
    after = transfer(ends, 4_000_000)
    assert 300_000 < throttled < 1_200_000
    assert min(free, after) > throttled


def test_a_cut_link_passes_nothing_until_it_is_restored(network: Network, ends: tuple[End, End]) -> None:
    assert ping(ends) is not None
    network.cut(0, 1)
    assert ping(ends, 0.5) is None
    network.restore(0, 1)
    assert ping(ends, 10.0) is not None


def test_a_cut_in_one_direction_is_one(network: Network) -> None:
    """Datagrams from 1 to 0 pass, from 0 to 1 they do not."""
    network.cut(0, 1, one_way=True)
    program = (
        "import socket, sys; sys.path.insert(0, sys.argv[1]); from harness.faults import switch;"
        "switch.enter(sys.argv[2]);"
        "mine = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); mine.bind((sys.argv[3], 9078));"
        "print('ready', flush=True); sys.stdin.readline();"
        "[mine.sendto(b'hello', (sys.argv[4], 9078)) for _ in range(3)]; mine.settimeout(1.0)\n"
        "try: print(mine.recv(100).decode())\n"
        "except TimeoutError: print('nothing')"
    )
    processes = []
    for host, other in ((0, 1), (1, 0)):
        where = [ROOT, network.namespaces[host], network.address(host), network.address(other)]
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", program, *where]
        processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
    for process in processes:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    heard = []
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    heard = [process.communicate()[0].strip() for process in processes]
    assert heard == ["hello", "nothing"]


def test_a_partition_leaves_the_links_inside_alone(network: Network, ends: tuple[End, End]) -> None:
    network.partition([0, 1])
    assert ping(ends) is not None
    network.partition([0])
    assert ping(ends, 0.5) is None
    network.restore_all()
    assert ping(ends, 10.0) is not None


def test_the_hosts_are_seen_from_nowhere_and_nothing_of_them_stays(network: Network) -> None:
    outside = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    assert "02:77:00" not in outside
    pid = int(network.namespaces[0].split("/")[2])
    network.close()
    assert not os.path.exists(f"/proc/{pid}")


def test_frames_of_a_link_keep_their_order_and_a_full_queue_loses() -> None:
    link = Link(rate=1000.0, delay=1.0)
    arrivals = [link.arrival(500, 10.0) for _ in range(3)]
    assert arrivals == [11.5, 12.0, 12.5]
    link.change(delay=0.0)  # faster from now on, but nothing overtakes what is on its way
    assert link.arrival(500, 10.0) == 12.5
    assert link.arrival(500, 13.0) == 13.0
    link.change(cut=True)
    assert link.arrival(500, 13.0) is None
    link.change(rate=1000.0)
    sent = sum(link.arrival(1000, 20.0) is not None for _ in range(2 * QUEUE_BYTES // 1000))
    assert sent == QUEUE_BYTES // 1000
