"""Agreement in a world too large for everyone to watch everyone: real peers on threads, on a real folder."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crowd import Node, cut, look_until, names_of, together

import trainer.elastic.gathering as gathering
from trainer.elastic.generation import Generation
from trainer.elastic.generation_record import generations
from trainer.elastic.overlay import FULL_MESH, neighbours_of
from trainer.storage.open import open_storage

pytestmark = pytest.mark.slow

NAMES = string.ascii_lowercase[:20]
Make = Callable[..., list[Node]]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Make]:
    made: list[Node] = []

    def make(names: str, **more: Any) -> list[Node]:
        new = [Node(name, tmp_path, place, **more) for place, name in enumerate(names)]
        made.extend(new)
        return new

    yield make
    for node in made:
        node.close()


def begin(nodes: Make, patience: float = 60.0) -> tuple[list[Node], Generation]:
    """Twenty members in their first generation, each watching its neighbours."""
    assert len(NAMES) > FULL_MESH
    crowd = nodes(NAMES, planned=len(NAMES), limit=99, patience=patience)
    first = together(crowd)
    assert names_of(first) == NAMES
    enter(crowd, first)
    return crowd, first


def enter(crowd: list[Node], generation: Generation) -> None:
    for node in crowd:
        node.membership.enter(generation)
    alive = {node.mine.member for node in crowd}
    for node in crowd:
        near = neighbours_of(node.mine.member, [seat.member for seat in generation.members]) & alive
        look_until(lambda node=node, near=near: all(node.peers.statuses().get(name) == "here" for name in near))


def filed(folder: Path, number: int) -> list[str]:
    return open_storage(str(folder)).list(f"membership/g{number:06d}")


def test_many_go_on_without_those_who_are_gone_and_file_nothing(nodes: Make, tmp_path: Path) -> None:
    crowd, first = begin(nodes)
    assert all(len(node.peers.statuses()) < len(NAMES) - 1 for node in crowd), "few watch each"
    for node in crowd[:3]:  # rank 0 among them
        node.peers.close()
    left = crowd[3:]
    second = together(left, first, step=5)
    assert (names_of(second), second.step, second.topology) == (NAMES[3:], 5, "mesh")
    assert all(seat.was_in == 1 for seat in second.members)
    assert len(filed(tmp_path, 2)) <= 2, "candidacies come as letters"
    record = open_storage(str(tmp_path)).read("membership/g000002.json")
    assert b"view" not in record


def test_a_loss_is_told_to_those_who_do_not_watch_it(nodes: Make) -> None:
    crowd, _ = begin(nodes)
    crowd[3].peers.close()
    for node in crowd:
        if node is not crowd[3]:
            look_until(lambda node=node: node.peers.mail.told_losses() == {"d": "gone"})


def test_the_next_gathers_where_the_first_dies_while_it_gathers(nodes: Make) -> None:
    crowd, first = begin(nodes)
    first_one, late, others = crowd[0], crowd[19], crowd[1:19]
    for node in [first_one, *others]:
        node.start(first, step=3)
    look_until(lambda: len(first_one.peers.mail.read_letters()) == len(others))
    assert others[0].waits(), "for the last one, which is there"
    first_one.over.set()
    first_one.peers.close()
    late.start(first, step=3)
    second = others[0].wait()
    assert names_of(second) == NAMES[1:]
    assert all(node.wait() == second for node in [*others, late])


def test_without_any_message_the_storage_is_enough(
    nodes: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd, first = begin(nodes)
    for node in crowd:
        monkeypatch.setattr(node.peers.mail, "hear", lambda message, sender: (False, None))
        monkeypatch.setattr(node.peers.mail, "put_letter", lambda letter, sender: "")
    crowd[5].peers.close()
    left = [node for node in crowd if node is not crowd[5]]
    second = together(left, first, step=4)
    assert names_of(second) == NAMES.replace("f", "")
    assert len(filed(tmp_path, 2)) >= len(left) - 2


def test_letters_that_nobody_sends_on_come_over_a_connection_of_their_own(
    nodes: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd, first = begin(nodes)
    monkeypatch.setattr(gathering, "TAKEOVER_SECONDS", 1e9)
    monkeypatch.setattr(gathering, "count_acting", lambda waited: 1)
    for node in crowd:
        take = node.peers.mail.put_letter
        monkeypatch.setattr(
            node.peers.mail, "put_letter", lambda letter, sender, take=take: take(letter, sender) and ""
        )
    second = together(crowd, first, step=4)
    assert names_of(second) == NAMES
    assert filed(tmp_path, 2) == []


def test_many_that_gather_at_once_write_one_record(
    nodes: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd, first = begin(nodes)
    monkeypatch.setattr(gathering, "count_acting", lambda waited: 99)
    last = first
    for number in (2, 3):
        last = together(crowd, last, step=number)
        assert (last.number, names_of(last)) == (number, NAMES)
        enter(crowd, last)
    assert len(generations(open_storage(str(tmp_path)))) == 3


def test_two_that_do_not_reach_each_other_are_both_in_over_one_that_all_reach(nodes: Make) -> None:
    crowd, first = begin(nodes)
    one = crowd[4]
    other = next(node for node in crowd[5:] if node.mine.member in one.peers.statuses())
    cut((one, other))
    look_until(lambda: one.peers.statuses()[other.mine.member] == "silent")
    second = together(crowd, first, step=2)
    assert sorted(names_of(second)) == sorted(NAMES)
    assert second.topology == "star"
    assert second.members[0].member not in (one.mine.member, other.mine.member)


def test_one_that_slept_is_left_out_and_comes_back_without_its_state(nodes: Make) -> None:
    crowd, first = begin(nodes, patience=2.0)
    sleeper, awake = crowd[7], [node for node in crowd if node is not crowd[7]]
    second = together(awake, first, step=5)
    assert names_of(second) == NAMES.replace("h", "")
    enter(awake, second)
    sleeper.start(first, step=99)
    assert sleeper.waits(), "it asks to be let in and takes nothing over"
    look_until(lambda: awake[0].membership.find_newcomers(second))
    [found] = awake[0].membership.find_newcomers(second)
    assert (found.member, found.was_in, found.step) == ("h", 0, 0)
    third = together(awake, second, step=7)
    assert sleeper.wait() == third
    assert (names_of(third), third.step) == (NAMES.replace("h", "") + "h", 7) or sorted(names_of(third)) == [*NAMES]
    assert third.members[third.rank_of("h") or 0].was_in == 0


def test_one_that_is_cut_off_from_all_is_left_out(nodes: Make) -> None:
    crowd, first = begin(nodes)
    alone, others = crowd[9], [node for node in crowd if node is not crowd[9]]
    cut(*((alone, node) for node in others))
    look_until(lambda: set(alone.peers.statuses().values()) == {"silent"})
    alone.start(first, step=9)
    look_until(lambda: others[0].membership.find_requests(first))
    second = together(others, first, step=9)
    assert names_of(second) == NAMES.replace("j", "")
    assert alone.waits()
