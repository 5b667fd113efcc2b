"""The supervisor's decisions, without a process."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import pytest

from dtrain_dagster.clusters.exit_policy import ProcessEnd, blame, describe_exit
from dtrain_dagster.clusters.presence import STALE_SECONDS, find_latest_presences, health, usage
from dtrain_dagster.clusters.supervision.launch import with_package
from trainer.documents.presences import NodePresence
from trainer.exit_codes import LOST
from trainer.node.environment import LaunchError, Seat, choose_port, merge_environment, rank_environment
from trainer.node.line_log import LineLog, last_lines, text_of
from trainer.node.processes import MARK
from trainer.runtime.launch import ORDER, GivenOrder, Launch

LAUNCH = {
    "node_count": 3,
    "processes_per_node": 2,
    "threads_per_rank": None,
    "env": {},
    "launch": 4,
    "elastic": False,
    "token": "t",
}


def test_of_failures_at_one_moment_the_likeliest_cause_is_blamed():
    codes = (143, LOST, 1, 2, -9, -15)
    stopped, lost_peer, raised, refused, killed, terminated = (
        ProcessEnd(rank=rank, node_id=rank, code=code) for rank, code in enumerate(codes)
    )
    everyone = [stopped, lost_peer, raised, refused, killed, terminated]
    random.Random(0).shuffle(everyone)
    assert sorted(everyone, key=blame) == [killed, refused, raised, lost_peer, stopped, terminated]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (1, "exit code 1"),
        (2, "exit code 2, unusable configuration or data"),
        (3, "exit code 3"),
        (77, "exit code 77, its budget is spent"),
        (143, "exit code 143, stopped by SIGTERM"),
        (-9, "killed by SIGKILL"),
        (-63, "killed by signal 63"),
    ],
)
def test_exits_in_words(code: int, words: str):
    assert describe_exit(code) == words


def test_lines_of_other_systems_and_progress_bars_are_lines(tmp_path: Path):
    """And no marks of carriage returns, at the end of each line or in a line of all that a progress bar has shown."""
    log = tmp_path / "logs" / "node-0.log"
    log.parent.mkdir()
    log.write_bytes(b"first\r\nsecond\r\n" + b"".join(b"\r%d of 5000" % step for step in range(5001)) + b"\ndone\n")
    lines = text_of(log).splitlines()
    assert lines[:2] == ["first", "second"]
    assert lines[-2:] == ["5000 of 5000", "done"]
    assert "\r" not in text_of(log)
    log.write_text(f"{'x' * 300_000}\nno newline")
    assert "bytes more" in text_of(log), "a line that no terminal could show is cut, in words"
    assert text_of(log).endswith("no newline")


def test_last_lines_are_read_from_the_end_of_any_log(tmp_path: Path):
    log = tmp_path / "log"
    assert last_lines(log, 3) == ""
    log.write_text("".join(f"line {number} {'x' * (number % 500)}\n" for number in range(2000)))
    whole = log.read_text().splitlines()
    for count in (0, 1, 7, 500, 1999, 2000, 5000):
        assert last_lines(log, count).splitlines() == (whole[-count:] if count else [])
    log.write_text("no newline at the end")
    assert last_lines(log, 2) == "no newline at the end"


def test_what_wins_in_the_environment():
    seat = Seat(node_id=2, master_port=5555)
    place = rank_environment(LAUNCH, seat, 1)
    assert (place["RANK"], place["WORLD_SIZE"], place["NODE_RANK"]) == (5, 6, 2)
    inherited = {"RANK": "9", "OMP_NUM_THREADS": "7", "A": "shell", "B": "shell"}
    merged = merge_environment(inherited, LAUNCH | {"env": {"B": "job", "WORLD_SIZE": "1"}}, seat, place)
    assert (merged["A"], merged["B"], merged["RANK"], merged["WORLD_SIZE"]) == ("shell", "job", "5", "6")
    assert merged["OMP_NUM_THREADS"] == "7"
    assert merge_environment(inherited, LAUNCH | {"threads_per_rank": 2}, seat, place)["OMP_NUM_THREADS"] == "2"
    own = LAUNCH | {"threads_per_rank": 2, "env": {"OMP_NUM_THREADS": "5"}}
    assert merge_environment(inherited, own, seat, place)["OMP_NUM_THREADS"] == "5"
    assert merge_environment({}, LAUNCH, seat, place)["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert set(map(type, merged.values())) == {str}


def test_each_process_is_told_its_own_launch_and_stay():
    elastic = rank_environment(LAUNCH | {"elastic": True}, Seat(node_id=2, master_port=5555, incarnation=3), 1)
    assert Launch.read(elastic) == Launch(number=4, incarnation=3, is_elastic=True, releases_nodes=True)
    outer = {**Launch(number=9, is_elastic=True).variables(), ORDER: '{"part_of": "fleet"}'}  # of who submits this one
    plain = merge_environment(
        outer, LAUNCH, Seat(node_id=2), rank_environment(LAUNCH, Seat(node_id=2, master_port=5555), 1)
    )
    assert (Launch.read(plain), GivenOrder.read(plain)) == (Launch(number=4), GivenOrder())
    first = rank_environment(LAUNCH | {"elastic": True}, Seat(node_id=2, master_port=5555), 1)
    assert {name for name in first if first[name] != elastic[name]} == {"DTRAIN_LAUNCH", MARK}


def test_a_taken_port_is_refused_and_a_free_one_found():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"master port {port} .*choose another"):
            choose_port(port)
    assert choose_port(port) == port
    assert 1024 < choose_port(None) < 65536


def test_health_of_a_node_follows_from_its_presence():
    node = NodePresence(node_id=1, launch=1, started_at=100.0, last_seen_at=110.0)
    assert health("j", node, 110.0 + STALE_SECONDS).healthy
    silent = health("j", node, 111.0 + STALE_SECONDS)
    assert (silent.healthy, silent.message) == (False, "silent for 11 s in j")
    left = NodePresence(node_id=1, launch=1, started_at=100.0, ended_at=120.0, exit_codes=(0, 0))
    assert health("j", left, 500.0).healthy


def test_each_second_of_each_stay_is_paid_once():
    lost = NodePresence(node_id=0, launch=2, incarnation=1, started_at=100.0, ended_at=120.0, exit_codes=(-9,))
    here = NodePresence(node_id=0, launch=2, incarnation=10, started_at=121.0, last_seen_at=190.0)
    also = NodePresence(node_id=1, launch=2, incarnation=9, started_at=100.0, last_seen_at=190.0)
    unwritten = NodePresence(node_id=1, launch=1, started_at=10.0, last_seen_at=50.0)  # its end: the disk was full
    nodes = [unwritten, here, lost, also]
    assert find_latest_presences(nodes) == [here, also]
    assert [use.ended_at for use in usage(nodes, "sku", running=True, now=200.0)] == [50.0, 200.0, 120.0, 200.0]
    assert [use.ended_at for use in usage(nodes, "sku", running=False, now=999.0)] == [50.0, 190.0, 120.0, 190.0]
    assert find_latest_presences([]) == usage([], "sku", running=True, now=1.0) == []


def test_the_project_is_found_and_the_users_own_path_comes_first():
    root = str(Path(__file__).parents[4])
    assert with_package({"PYTHONPATH": "/own"})["PYTHONPATH"].split(":") == ["/own", root]
    assert with_package({"A": "b"}) == {"A": "b", "PYTHONPATH": root}


def test_a_line_waits_for_its_end_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = LineLog(tmp_path / "logs" / "node-0.log", "--- start ---")
    one, two = log.open_pipe(), log.open_pipe()
    os.write(one, b"first ")
    os.write(two, b"second\nthi")
    log.pump()
    os.write(one, b"line\n")
    os.write(two, b"rd")
    log.pump()
    path = tmp_path / "logs" / "node-0.log"
    assert path.read_text() == "--- start ---\nsecond\nfirst line\n"
    monkeypatch.setattr("trainer.node.line_log.PATIENCE_SECONDS", -1.0)
    log.pump()
    assert path.read_text().endswith("first line\nthird")
    monkeypatch.undo()
    os.write(one, b"the end")
    for pipe in (one, two):
        os.close(pipe)
    log.close()
    assert path.read_text().endswith("thirdthe end")
