"""Who is in: the agreement among real peers, each a thread with peers of its own, on a real folder."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from crowd import Node, cut, names_of, together

from harness.waiting import until
from trainer.documents.schemas import START
from trainer.elastic.generation import Generation
from trainer.elastic.generation_record import generations
from trainer.errors import NoGenerationError
from trainer.storage.open import open_storage


def test_those_of_a_launch_start_together_and_go_on_without_who_is_gone(
    nodes: Callable[..., list[Node]], tmp_path: Path
) -> None:
    a, b, c = nodes("abc")
    for node in (c, a):
        node.start()
    assert a.waits(), "for the third of the plan"
    b.start()
    first = a.wait()
    assert first == b.wait() == c.wait()
    assert names_of(first) == "abc"
    assert first.reason == START
    a.peers.close()  # rank 0 dies
    second = together([c, b], first, step=5, reason="a is gone")
    assert (names_of(second), second.number, second.reason, second.step) == ("bc", 2, "a is gone", 5)
    c.start(second, step=6)
    assert c.waits(), "b is there, and has not come"
    assert [item.number for item in generations(open_storage(str(tmp_path)))] == [1, 2]
    assert names_of(generations(open_storage(str(tmp_path)))[-1]) == "bc", "the record is what they were told"


def test_many_agree_again_and_again_and_never_on_two_things(nodes: Callable[..., list[Node]], tmp_path: Path) -> None:
    crowd = nodes("abcdefgh", planned=8)
    last: Generation | None = None
    for number in range(1, 6):
        last = together(crowd[number:] + crowd[:number], last, step=number)
        assert (last.number, names_of(last)) == (number, "abcdefgh")
    assert len(generations(open_storage(str(tmp_path)))) == 5


def test_newcomers_take_over_when_nobody_is_left(nodes: Callable[..., list[Node]]) -> None:
    a, b = nodes("ab", planned=1)
    first = a.start().wait()
    b.start()
    assert b.waits()
    a.peers.close()
    second = b.wait()
    assert (names_of(second), second.number, second.has_state, second.reason) == ("b", 2, False, "no survivors")
    assert first.number == 1


@pytest.mark.slow
def test_a_member_that_is_cut_off_takes_nothing_over(nodes: Callable[..., list[Node]]) -> None:
    """It notices first, and would go on alone; the storage shows that the others are at work."""
    a, b, c = nodes("abc", patience=3.0)
    first = together([a, b, c])
    cut((a, c), (b, c))
    until(lambda: c.peers.statuses() == {"a": "silent", "b": "silent"})
    c.start(first, step=9, reason="a is silent")
    until(lambda: a.membership.find_requests(first))
    assert [item.member for item in a.membership.find_requests(first)] == ["c"]
    assert not a.membership.is_over(first)
    second = together([a, b], first, step=9)
    assert names_of(second) == "ab"
    assert a.membership.is_over(first)
    for _ in range(7):  # longer than its patience
        assert a.membership.find_newcomers(second) == []
        assert c.waits(), "fenced out, as long as others are at work and it is not in their sight"
    taken_over = c.wait()  # nobody has said for longer than that that they are at work
    assert (names_of(taken_over), taken_over.has_state) == ("c", False)
    assert a.membership.is_over(second), "and they hear of it"


@pytest.mark.slow
def test_of_members_that_are_all_cut_off_one_goes_on(nodes: Callable[..., list[Node]], tmp_path: Path) -> None:
    crowd = nodes("abc", patience=30.0)
    first = together(crowd)
    a, b, c = crowd
    cut((a, b), (a, c), (b, c))
    for node in crowd:
        node.start(first, step=9)
    until(lambda: len(generations(open_storage(str(tmp_path)))) == 2)
    [winner] = generations(open_storage(str(tmp_path)))[1].members
    [there] = [node for node in crowd if node.mine.member == winner.member]
    assert (there.wait().step, winner.was_in) == (9, 1)
    for _ in range(3):
        assert all(node.waits() for node in crowd if node is not there)


def test_who_waits_stops_waiting_when_there_is_nothing_to_wait_for(nodes: Callable[..., list[Node]]) -> None:
    a, _ = nodes("ab")
    a.start()
    assert a.waits()
    a.over.set()
    assert isinstance(a.error(), KeyError)


def exchange(one: Path, other: Path) -> None:
    """Let two paths exchange what they name, in one step (Linux)."""
    here, exchanges = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), exchanges)
    assert not failed, os.strerror(ctypes.get_errno())


def test_storage_may_fail_for_a_while_and_a_folder_that_was_deleted_is_no_new_start(
    nodes: Callable[..., list[Node]], tmp_path: Path
) -> None:
    (a,) = nodes("a", planned=1, patience=5.0)
    first = a.start().wait()
    folder, aside = tmp_path / "membership", tmp_path / "aside"
    folder.rename(aside)
    folder.symlink_to(folder)  # every access fails
    a.start(first)
    assert a.waits()
    exchange(folder, aside)  # at once: a moment without any folder would be a folder that was deleted
    second = a.wait()
    assert second.number == 2

    shutil.rmtree(folder)
    a.start(second)
    assert "no longer holds generation 2" in str(a.error())
    folder.symlink_to(folder)
    (b,) = nodes("b", planned=1, patience=0.5)
    b.start()
    assert isinstance(error := b.error(), NoGenerationError)
    assert str(tmp_path) in str(error)
