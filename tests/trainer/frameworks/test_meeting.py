"""Ranks that meet as threads of this process, on loopback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.worlds import free_port
from trainer.comm.launch_secret import LaunchSecret
from trainer.comm.launcher_env import RankFacts
from trainer.errors import ConfigError
from trainer.frameworks.meeting import Meeting, MeetingError, bind_address

SECRET = LaunchSecret(b"s" * 32)


def facts_of(rank: int, size: int, port: int, address: str = "127.0.0.1") -> RankFacts:
    return RankFacts(rank=rank, world_size=size, master_addr=address, master_port=port)


def all_ranks(size: int, do: Callable[[Meeting], Any]) -> list[Any]:
    """What each rank returns from a meeting of this many."""
    port = free_port()

    def of(rank: int) -> Any:
        with Meeting(facts_of(rank, size, port), SECRET, {}, seconds=30) as meeting:
            return do(meeting)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(of, range(size)))


def test_each_rank_gets_what_all_have_said_in_order_and_again():
    def twice(meeting: Meeting) -> list[str]:
        return meeting.gather(f"a{meeting.facts.rank}") + meeting.gather("")

    assert all_ranks(3, twice) == [["a0", "a1", "a2", "", "", ""]] * 3
    assert all_ranks(1, twice) == [["a0", ""]]


def test_the_others_hear_rank_0_and_see_its_end():
    def one_round(meeting: Meeting) -> str:
        if meeting.facts.rank == 0:
            meeting.tell("7")
            return "told"
        said = meeting.hear()
        meeting.wait_for_end(20)
        with pytest.raises(MeetingError, match="rank 0 has left"):
            meeting.hear()
        return said

    assert all_ranks(3, one_round) == ["told", "7", "7"]


def test_a_rank_that_does_not_come_is_named():
    port = free_port()
    with pytest.raises(MeetingError, match=r"ranks \[1, 2\] did not connect to 127\.0\.0\.1"):
        Meeting(facts_of(0, 3, port), SECRET, {}, seconds=0.3)
    with pytest.raises(MeetingError, match=r"rank 0 is not at 127\.0\.0\.1"):
        Meeting(facts_of(1, 3, port), SECRET, {}, seconds=0.3)


def test_who_does_not_know_the_secret_is_turned_away():
    port, said = free_port(), list[str]()

    def stranger() -> None:
        try:
            Meeting(facts_of(1, 2, port), LaunchSecret(b"t" * 32), {}, seconds=30)
        except MeetingError as error:
            said.append(str(error))

    thread = threading.Thread(target=stranger)
    thread.start()
    with pytest.raises(MeetingError, match=r"ranks \[1\] did not connect"):
        Meeting(facts_of(0, 2, port), SECRET, {}, seconds=2)
    thread.join()
    assert "is not rank 0" in said[0]


def test_rank_0_listens_only_where_it_is_said_to_be():
    assert bind_address(facts_of(0, 2, 1), {}) == "127.0.0.1"
    assert bind_address(facts_of(0, 2, 1, "10.1.2.3"), {}) == "10.1.2.3"
    assert bind_address(facts_of(0, 2, 1, "node-7"), {"DTRAIN_HOST": "10.9.9.9"}) == "10.9.9.9", "a name may lie"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another --master-port"):
            Meeting(facts_of(0, 2, taken.getsockname()[1]), SECRET, {}, seconds=1)
