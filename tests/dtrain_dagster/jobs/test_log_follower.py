"""Logs that are followed: of files of this machine, and of a cluster that says them anew each time."""

from __future__ import annotations

from pathlib import Path

from dtrain_dagster.clusters.azure_ml.jobs import by_node
from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.jobs.log_follower import FileFollower, LogPoller


def test_logs_are_followed_in_whole_lines(tmp_path: Path):
    log = tmp_path / "node-0.log"
    log.write_bytes(b"old\nolder\n")
    follower = FileFollower(tmp_path)
    follower.skip_to_end(keep_lines=1)
    with open(log, "ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert list(follower.read()) == [(0, "older"), (0, "one")]
        file.write(b"o\n")
        (tmp_path / "node-10.log").write_bytes(b"ten")
        assert list(follower.read()) == [(0, "two")]
        assert list(follower.read(to_the_end=True)) == [(10, "ten")]
        assert list(follower.read(to_the_end=True)) == []


def test_logs_that_only_the_cluster_has_are_given_line_by_line():
    one, other = "=== node-0.log ===\n", "\n=== node-10.log ===\n"
    looks = [
        f"{one}a\nb{other}x",
        f"{one}a\nb\nc",  # node 10 is not there, as between two launches
        None,
        f"{one}a\nb\ncc{other}x",
        f"{one}a\nb\ncc{other}x",
        f"{one}a\n2\n3{other}x\ny",  # written anew
    ]

    def ask() -> str:
        if (text := looks.pop(0)) is None:
            raise ClusterError("not now")
        return text

    follower = LogPoller(ask, 0.0)
    said = [list(follower.read()) for _ in range(5)]
    assert said == [[(0, "a")], [(0, "b")], [], [], [(0, "cc"), (10, "x")]]
    assert list(follower.read(to_the_end=True)) == [(0, "2"), (0, "3"), (10, "y")]
    looks += [f"{one}a\nb{other}x", f"{one}a\nb\nc{other}x\ny"]
    follower = LogPoller(ask, 0.0)
    follower.skip_to_end(keep_lines=1)
    assert list(follower.read(node_id=0, to_the_end=True)) == [(0, "b"), (0, "c")]


def test_a_line_of_one_rank_does_not_repeat_those_of_the_next():
    texts = {0: "a\n", 1: "x\n"}
    before = "--- launch 1, j-l1 ---\nold\n"  # kept of a launch that has ended
    follower = LogPoller(
        lambda: f"=== node-0.log ===\n{before}--- launch 2, j-l2 ---\n{by_node(texts, 2)[0]}".rstrip("\n"), 0.0
    )
    follower.skip_to_end(keep_lines=1)
    assert list(follower.read(to_the_end=True)) == [(0, "x")]
    texts |= {0: "a\nb\n", 2: "of node 1\n"}
    assert list(follower.read(to_the_end=True)) == [(0, "b")]
    texts[1] = "x\ny\n"
    assert list(follower.read()) == []
    assert list(follower.read()) == [(0, "y")]
