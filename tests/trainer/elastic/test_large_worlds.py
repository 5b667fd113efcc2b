"""Agreement in a world too large for everyone to watch everyone: real peers on threads, on a real folder."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path

import pytest
from crowd import Node, cut, names_of, together

import trainer.elastic.membership as membership
from harness.waiting import until
from trainer.elastic.generation import FULL_MESH, Generation, watched_by
from trainer.elastic.generation_record import generations
from trainer.storage.open import open_storage

pytestmark = pytest.mark.slow

NAMES = string.ascii_lowercase[:20]
Make = Callable[..., list[Node]]


def begin(nodes: Make, patience: float = 60.0, names: str = NAMES) -> tuple[list[Node], Generation]:
    """Members in their first generation; of twenty, each watches the coordinators."""
    assert len(NAMES) > FULL_MESH
    crowd = nodes(names, planned=len(names), limit=99, patience=patience)
    first = together(crowd)
    assert names_of(first) == names
    enter(crowd, first)
    return crowd, first


def enter(crowd: list[Node], generation: Generation) -> None:
    for node in crowd:
        node.membership.enter(generation)
    alive = {node.mine.member for node in crowd}
    for node in crowd:
        near = watched_by(node.mine.member, [seat.member for seat in generation.members]) & alive
        until(lambda node=node, near=near: all(node.peers.statuses().get(name) == "here" for name in near))


def test_many_go_on_without_those_who_are_gone(nodes: Make) -> None:
    crowd, first = begin(nodes)
    assert [len(node.peers.statuses()) for node in crowd] == [19] * 4 + [4] * 16, "few watch all"
    gone = [*crowd[:2], crowd[10]]  # rank 0 among them
    for node in gone:
        node.peers.close()
    left = [node for node in crowd if node not in gone]
    second = together(left, first, step=5)
    assert (names_of(second), second.step, second.topology) == (NAMES[2:10] + NAMES[11:], 5, "mesh")
    assert all(seat.was_in == 1 for seat in second.members)


def test_one_goes_on_where_all_coordinators_are_gone_and_others_with_them(nodes: Make) -> None:
    crowd, first = begin(nodes)
    gone = [*crowd[:5], crowd[12]]
    for node in gone:
        node.peers.close()
    left = [node for node in crowd if node not in gone]
    assert names_of(together(left, first, step=5)) == NAMES[5:12] + NAMES[13:]


def test_newcomers_take_over_where_nobody_of_many_is_left(nodes: Make) -> None:
    crowd, _ = begin(nodes)
    newcomers = nodes("yz", planned=len(NAMES), limit=99)
    for node in crowd:
        node.peers.close()
    assert names_of(together(newcomers)) == "yz"


def test_the_next_proposes_where_the_first_dies_while_it_waits(nodes: Make) -> None:
    crowd, first = begin(nodes)
    first_one, late, others = crowd[0], crowd[19], crowd[1:19]
    for node in [first_one, *others]:
        node.start(first, step=3)
    assert others[0].waits(), "for the last one, which is there"
    first_one.over.set()
    assert isinstance(first_one.error(), KeyError)
    first_one.peers.close()
    late.start(first, step=3)
    second = others[0].wait()
    assert names_of(second) == NAMES[1:]
    assert all(node.wait() == second for node in [*others, late])


def test_without_any_message_the_storage_is_enough(nodes: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    crowd, first = begin(nodes)
    for node in crowd:
        monkeypatch.setattr(node.peers, "broadcast", lambda message: None)
    crowd[5].peers.close()
    left = [node for node in crowd if node is not crowd[5]]
    second = together(left, first, step=4)
    assert names_of(second) == NAMES.replace("f", "")


def test_many_that_propose_at_once_write_one_record(
    nodes: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd, first = begin(nodes)
    monkeypatch.setattr(membership, "count_acting", lambda waited: 99)
    last = together(crowd, first, step=2)
    assert (last.number, names_of(last)) == (2, NAMES)
    assert generations(open_storage(str(tmp_path))) == [first, last]


def test_two_that_do_not_reach_each_other_are_both_in_over_one_that_all_reach(nodes: Make) -> None:
    crowd, first = begin(nodes)
    one, other = crowd[1], crowd[9]
    cut((one, other))
    until(lambda: one.peers.statuses()[other.mine.member] == "silent")
    second = together(crowd, first, step=2)
    assert sorted(names_of(second)) == sorted(NAMES)
    assert second.topology == "star"
    assert second.members[0].member not in (one.mine.member, other.mine.member)


@pytest.mark.parametrize("names", ["abc", pytest.param(NAMES, marks=pytest.mark.long)])
def test_one_that_slept_is_left_out_and_comes_back_without_its_state(nodes: Make, names: str) -> None:
    """It is there, but it does not answer; and it believes that it is further than the others."""
    crowd, first = begin(nodes, patience=2.0, names=names)
    sleeper, awake = crowd.pop(1), crowd
    second = together(awake, first, step=5)
    assert names_of(second) == names.replace("b", "")
    enter(awake, second)
    sleeper.start(first, step=99, reason="a is silent")
    assert sleeper.waits(), "it asks to be let in and takes nothing over"
    until(lambda: awake[0].membership.find_newcomers(second))
    [found] = awake[0].membership.find_newcomers(second)
    assert (found.member, found.was_in, found.step, found.reason) == ("b", 0, 0, "")
    third = together(awake, second, step=7)
    assert sleeper.wait() == third
    assert (names_of(third), third.step) == (names.replace("b", "") + "b", 7), "behind those who have the state"
    assert (third.members[-1].was_in, third.source) == (0, 0)


def test_one_that_is_cut_off_from_all_is_left_out(nodes: Make) -> None:
    crowd, first = begin(nodes)
    alone, others = crowd[9], [node for node in crowd if node is not crowd[9]]
    cut(*((alone, node) for node in others))
    until(lambda: set(alone.peers.statuses().values()) == {"silent"})
    until(lambda: all(node.peers.statuses()["j"] == "silent" for node in crowd[:4]))
    alone.start(first, step=9)
    until(lambda: others[0].membership.find_requests(first))
    second = together(others, first, step=9)
    assert names_of(second) == NAMES.replace("j", "")
    assert alone.waits()
