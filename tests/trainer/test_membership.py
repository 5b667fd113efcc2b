"""Who is in: the decisions as tables and by chance; the agreement among real peers on a real folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.generation import (
    START,
    TOLD,
    Candidate,
    Generation,
    attempts,
    choose,
    conflicts,
    isolated,
    missing,
    pause,
    survivors_of,
)
from trainer.membership import Membership, NoGenerationError, generations
from trainer.peers import Address, Peers
from trainer.storage import Storage

RETRIES = 3


def seat(name: str, place: int = 0, **what: Any) -> Candidate:
    """A candidate that is ready, of launch 1."""
    fields: dict[str, Any] = {"node": place, "local_rank": 0, "launch": 1, "host": "h", "port": 1, "ready": True}
    return Candidate(member=name, **{**fields, "rank": place, **what})


def generation(names: str, number: int = 4, **what: Any) -> Generation:
    members = tuple(seat(name, place) for place, name in enumerate(names))
    return Generation(number=number, launch=1, members=members, **what)


def candidates(names: str, cut: str = "", was_in: int = 4, **what: Any) -> list[Candidate]:
    """Members of generation 4 that want to be in the next; ``cut``: pairs that cannot reach each other, as "ab cd"."""
    links = [set(pair) for pair in cut.split()]
    return [
        seat(
            name, place, was_in=was_in, **what,
            view={other: "silent" if {name, other} in links else "here" for other in names if other != name},
        )
        for place, name in enumerate(names)
    ]  # fmt: skip


def chosen(previous: Generation | None, found: list[Candidate], limit: int = 9, proposer: str = "") -> str:
    result = choose(previous, 1, found, RETRIES, limit, proposer)
    if result is None:
        return ""
    return "".join(item.member for item in result.members) + ("*" if result.topology == "star" else "")


@pytest.mark.parametrize(
    ("names", "cut", "proposer", "members"),
    [
        ("abc", "", "a", "abc"),
        ("ab", "ab", "a", "a"),
        ("ab", "ab", "b", "b"),  # never itself: it is alive for certain
        ("abc", "ab", "b", "cab*"),  # all reach c
        ("abc", "ab ac", "b", "bc"),  # a is cut off: no link of b or c is to blame
        ("abc", "ab ac", "a", "bc"),
        ("abc", "ab ac bc", "b", "b"),  # nobody reaches anybody
        ("abcd", "ab cd", "a", "ac"),
        ("abcd", "ac ad bc bd", "a", "ab"),  # two halves
        ("abcd", "ac ad bc bd", "d", "cd"),
        ("abcd", "ab bc cd", "a", "ac"),
        ("abcd", "bc", "d", "abcd*"),
    ],
)
def test_those_go_on_who_reach_each_other(names: str, cut: str, proposer: str, members: str) -> None:
    assert chosen(generation(names), candidates(names, cut), proposer=proposer) == members


def test_newcomers_follow_survivors_as_far_as_there_is_room() -> None:
    previous = generation("ab")
    survivors = [replace(item, rank=1 - item.rank) for item in candidates("ab")]  # b was rank 0
    found = [seat("z", 0), seat("y", 1), *survivors, seat("late", ready=False), seat("old", launch=2)]
    assert chosen(previous, found) == "bazy"
    assert chosen(previous, found, limit=3) == "baz"
    assert chosen(previous, found, limit=1) == "ba", "no survivor has to make room"
    result = choose(previous, 1, [seat("z", was_in=3, step=99), *survivors], RETRIES, 9)
    assert result is not None
    assert result.members[-1].was_in == 0, "a state of a generation that is over does not count"
    assert result.step == 0


def test_a_launch_starts_anew_and_a_number_is_never_used_again() -> None:
    previous = replace(generation("ab"), launch=0)
    result = choose(previous, 1, [seat("c", 1), seat("b", 0)], RETRIES, 9)
    assert result is not None
    assert (result.number, result.reason, result.has_state) == (5, START, False)
    assert [item.member for item in result.members] == ["b", "c"]
    first = choose(None, 1, [seat("a")], RETRIES, 9, first=7)
    assert first is not None
    assert first.number == 7
    assert choose(None, 1, [seat("a", ready=False)], RETRIES, 9) is None


def test_the_state_of_the_furthest_counts_the_lowest_rank_of_equals() -> None:
    seats = (seat("a", was_in=4, step=7), seat("b", was_in=4, step=8), seat("c", was_in=4, step=8), seat("d", step=99))
    four = Generation(number=5, launch=1, members=seats)
    assert (four.source, four.has_state, four.all_equal) == (1, True, False)
    evaluated = replace(four, members=(*seats[:2], replace(seats[2], progress=8)))
    assert evaluated.source == 2
    assert replace(four, members=seats[1:3]).all_equal
    assert not replace(four, members=(seat("a"), seat("b"))).all_equal, "newcomers have no state to be equal in"


def test_reasons_are_those_of_who_saw_it() -> None:
    found = candidates("abc")
    said = [replace(found[0], reason="x is gone"), replace(found[1], reason=f"{TOLD} a: x is gone"), found[2]]
    result = choose(generation("abcx"), 1, said, RETRIES, 9)
    assert result is not None
    assert result.reason == "x is gone"


@pytest.mark.parametrize(
    ("names", "cut", "cut_off"),
    [("abc", "", ""), ("abc", "ab", ""), ("abc", "ab ac", "a"), ("ab", "ab", ""), ("abc", "ab ac bc", "")],
)
def test_only_a_host_that_nobody_reaches_is_cut_off(names: str, cut: str, cut_off: str) -> None:
    assert isolated(candidates(names, cut)) == set(cut_off)


def test_one_of_two_is_believed_that_says_it_cannot_reach_the_other() -> None:
    one, other = seat("a", view={"b": "gone", "x": "gone"}), seat("b", view={"a": "here"})
    assert conflicts([one, other]) == {frozenset("ab")}
    assert conflicts([replace(one, view={"b": "unknown"}), other]) == set()


@pytest.mark.parametrize(
    ("failed", "step", "before", "left", "count", "seconds"),
    [
        (False, 10, 0, "abc", 0, 0.0),
        (True, 10, 0, "abc", 1, 0.5),
        (True, 10, 1, "abc", 2, 1.0),
        (True, 10, 2, "abc", 3, 2.0),
        (True, 10, 3, "abc", 4, 2.0),  # no longer than that: then it goes through one rank
        (True, 11, 3, "abc", 1, 0.5),  # a step was done in between
        (True, 10, 3, "ab", 0, 0.0),  # somebody is lost: that is why
    ],
)
def test_failures_in_a_row_are_counted_and_waited_for_longer_each_time(
    failed: bool, step: int, before: int, left: str, count: int, seconds: float
) -> None:
    previous = replace(generation("abc"), attempt=before, step=10)
    found = candidates(left, step=step, communication=failed)
    assert attempts(previous, found) == count
    assert pause(previous, found, RETRIES) == seconds
    result = choose(previous, 1, found, RETRIES, 9)
    assert result is not None
    assert (result.attempt, result.topology) == (count, "star" if count > RETRIES else "mesh")


def test_a_link_that_is_cut_is_given_time_to_come_back_but_not_a_host() -> None:
    previous = generation("abc")
    assert pause(previous, candidates("abc", "ab"), RETRIES) == 3.5
    assert pause(previous, candidates("abc", "ab ac"), RETRIES) == 0.0
    assert pause(previous, candidates("abc", "ab ac bc"), RETRIES) == 3.5


def test_whom_a_proposal_waits_for() -> None:
    preparing = seat("b", ready=False)
    assert missing(generation("abc"), 1, 3, [seat("a"), preparing]) == ["b", "c"]
    assert missing(None, 1, 4, [seat("a"), preparing, seat("x", launch=2)]) == ["b", "?0", "?1"]
    assert missing(replace(generation("xyz"), launch=0), 1, 1, [seat("a")]) == []


views = st.sampled_from(["here", "here", "here", "unknown", "silent", "gone"])


@st.composite
def situations(draw: st.DrawFn) -> tuple[Generation | None, list[Candidate]]:
    """Any generation, and anybody who wants to be in the next one with any view of the others."""
    names = "abcdefg"[: draw(st.integers(1, 7))]
    members = draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    known = draw(st.booleans())
    attempt = draw(st.integers(0, 5))
    previous = generation("".join(members), attempt=attempt, step=3) if known else None
    found = []
    for place, name in enumerate(names):
        rank = members.index(name) if name in members else place
        found.append(
            seat(
                name, place, rank=rank, ready=draw(st.integers(0, 5)) > 0, launch=draw(st.sampled_from([1, 1, 1, 2])),
                was_in=draw(st.sampled_from([0, 3, 4, 4])), step=draw(st.integers(3, 5)),
                communication=draw(st.booleans()), chunk=draw(st.sampled_from([None, 8])),
                view={other: draw(views) for other in names if draw(st.integers(0, 9))},
            )
        )  # fmt: skip
    return previous, draw(st.permutations(found))


@given(situations(), st.integers(1, 8), st.integers(0, 7))
def test_whatever_they_see_the_chosen_can_work_together(
    situation: tuple[Generation | None, list[Candidate]], limit: int, place: int
) -> None:
    previous, found = situation
    ready = [item for item in found if item.ready and item.launch == 1]
    proposer = ready[place % len(ready)].member if ready else ""
    result = choose(previous, 1, found, RETRIES, limit, proposer)
    if not ready:
        assert result is None
        return
    assert result is not None, "somebody is there: the training must go on"
    names = [item.member for item in result.members]
    assert set(names) <= {item.member for item in ready}
    assert len(set(names)) == len(names) > 0
    assert result.number == (previous.number + 1 if previous else 1)

    bad = conflicts(result.members)
    if result.topology == "star":
        bad = {pair for pair in bad if names[0] in pair}
    assert not bad, "they reach each other, or all of them reach the hub"

    survivors = [item.member for item in survivors_of(previous, ready)]
    assert len(names) <= max(limit, len(survivors))
    rest = names[1:] if result.topology == "star" else names
    assert [name for name in rest if name in survivors] == [name for name in survivors if name in rest], "keep order"
    later = [name in survivors for name in rest]
    assert later == sorted(later, reverse=True), "newcomers follow"
    assert all((item.was_in == 4) == (item.member in survivors) for item in result.members)
    if result.has_state:
        best = result.members[result.source]
        assert best.was_in
        assert result.step == best.step == max(item.step for item in result.members if item.was_in)
    assert choose(previous, 1, found[::-1], RETRIES, limit, proposer) == result, "in whatever order they are read"


# From here on: the agreement. Each node is a thread with peers of its own; the folder is a real one.


class Line(Peers):
    """Peers whose connections to some lead nowhere: to an address that takes them and never says a word."""

    def __init__(self, name: str, interval: float, timeout: float) -> None:
        self.known: dict[str, Address] = {}
        self.cut: set[str] = set()
        self.nowhere = socket.create_server(("127.0.0.1", 0))
        super().__init__(name, "token", "127.0.0.1", interval, timeout)

    def follow(self, addresses: Mapping[str, Address]) -> None:
        self.known = dict(addresses)
        super().follow(self.known | {member: self.nowhere.getsockname() for member in self.cut & set(self.known)})

    def cut_off(self, member: str) -> None:
        known = self.known
        self.follow({name: address for name, address in known.items() if name != member})  # ends the connection
        self.cut.add(member)
        self.follow(known)

    def close(self) -> None:
        super().close()
        self.nowhere.close()


def cut(*pairs: tuple[Node, Node]) -> None:
    """Nothing passes between these any more."""
    for one, other in pairs:
        one.peers.cut_off(other.mine.member)
        other.peers.cut_off(one.mine.member)


class Node:
    """One member: its peers, its part in the membership, and what it says of itself."""

    def __init__(self, name: str, folder: Path, place: int, planned: int = 3, patience: float = 60.0) -> None:
        self.peers = Line(name, 0.1, 3.0)
        self.membership = Membership(
            Storage(str(folder)), self.peers, 1, planned, limit=8, retries=0, patience=patience, start_patience=patience
        )
        host, port = self.peers.address
        self.mine = seat(name, place, host=host, port=port)
        self.result: Generation | Exception | None = None
        self.over = threading.Event()
        self._thread = threading.Thread()

    def ended(self) -> None:
        if self.over.is_set():
            raise KeyError("over")

    def start(self, after: Generation | None = None, **what: Any) -> Node:
        """Agree on a thread; ``after``: the generation that this node was in and brings a state from."""
        number = after.number if after else 0
        rank = after.rank_of(self.mine.member) if after else self.mine.rank
        mine = replace(self.mine, rank=rank, **{"was_in": number, **what})

        def work() -> None:
            try:
                self.result = self.membership.agree(mine, number, self.ended)
            except Exception as error:
                self.result = error

        self.result = None
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        return self

    def wait(self) -> Generation:
        self._thread.join(60)
        assert isinstance(self.result, Generation), self.result
        return self.result

    def error(self) -> Exception:
        self._thread.join(60)
        assert isinstance(self.result, Exception), self.result
        return self.result

    def waits(self) -> bool:
        """Does it still wait, after others had time enough to act?"""
        self._thread.join(1)
        return self._thread.is_alive()

    def close(self) -> None:
        self.over.set()
        self._thread.join(10) if self._thread.ident else None
        self.peers.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., list[Node]]]:
    made: list[Node] = []

    def make(names: str, **more: Any) -> list[Node]:
        new = [Node(name, tmp_path, place, **more) for place, name in enumerate(names)]
        made.extend(new)
        return new

    yield make
    for node in made:
        node.close()


def together(crowd: list[Node], after: Generation | None = None, **what: Any) -> Generation:
    """What these agree on, all the same."""
    for node in crowd:
        node.start(after, **what)
    found = [node.wait() for node in crowd]
    assert all(item == found[0] for item in found)
    return found[0]


def names_of(found: Generation) -> str:
    return "".join(item.member for item in found.members)


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
    assert [item.number for item in generations(Storage(str(tmp_path)))] == [1, 2]
    assert names_of(generations(Storage(str(tmp_path)))[-1]) == "bc", "the record is what they were told"


def test_many_agree_again_and_again_and_never_on_two_things(nodes: Callable[..., list[Node]], tmp_path: Path) -> None:
    crowd = nodes("abcdefgh", planned=8)
    last: Generation | None = None
    for number in range(1, 6):
        last = together(crowd[number:] + crowd[:number], last, step=number)
        assert (last.number, names_of(last)) == (number, "abcdefgh")
    assert len(generations(Storage(str(tmp_path)))) == 5


def test_who_was_left_out_comes_back_without_its_state(nodes: Callable[..., list[Node]]) -> None:
    """A process that slept through a regroup: it is there, but it does not answer."""
    a, b, c = nodes("abc", patience=1.0)
    first = together([a, b, c])
    second = together([a, b], first, step=5)
    assert names_of(second) == "ab"
    c.start(first, step=99, reason="b is silent")  # it wakes up, further than the others, it believes
    assert c.waits(), "it asks to be let in and takes nothing over"
    look_until(lambda: a.membership.newcomers(second))
    found = a.membership.newcomers(second)
    assert [(item.member, item.was_in, item.step, item.reason) for item in found] == [("c", 0, 0, "")]
    third = together([a, b], second, step=7)
    assert c.wait() == third
    assert (names_of(third), third.source, third.step) == ("abc", 0, 7)
    assert third.members[2].was_in == 0


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
    a, b, c = nodes("abc", patience=4.0)
    first = together([a, b, c])
    cut((a, c), (b, c))
    look_until(lambda: c.peers.view() == {"a": "silent", "b": "silent"})
    c.start(first, step=9, reason="a is silent")
    look_until(lambda: a.membership.asking(first))
    assert [item.member for item in a.membership.asking(first)] == ["c"]
    assert not a.membership.is_over(first)
    second = together([a, b], first, step=9)
    assert names_of(second) == "ab"
    assert a.membership.is_over(first)
    for _ in range(7):  # longer than its patience
        assert a.membership.newcomers(second) == []
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
    look_until(lambda: len(generations(Storage(str(tmp_path)))) == 2)
    [winner] = generations(Storage(str(tmp_path)))[1].members
    [there] = [node for node in crowd if node.mine.member == winner.member]
    assert (there.wait().step, winner.was_in) == (9, 1)
    for _ in range(3):
        assert all(node.waits() for node in crowd if node is not there)


def look_until(true: Callable[[], Any]) -> None:
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_who_waits_stops_waiting_when_there_is_nothing_to_wait_for(nodes: Callable[..., list[Node]]) -> None:
    a, _ = nodes("ab")
    a.start()
    assert a.waits()
    a.over.set()
    assert isinstance(a.error(), KeyError)


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
    folder.unlink()
    aside.rename(folder)
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


RACER = """
import json, sys
from dataclasses import asdict
from trainer.generation import Candidate
from trainer.membership import Membership
from trainer.peers import Peers
from trainer.storage import Storage

folder, name, place, planned = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
peers = Peers(name, "token", "127.0.0.1", 0.1, 3.0)
membership = Membership(Storage(folder), peers, 1, planned, 99, 0, 30.0, 30.0)
# All propose at once, each something of its own (who proposes is in the reason): one wins.
membership._turn = lambda *rest: 0.0
host, port = peers.address
mine = Candidate(member=name, node=place, local_rank=0, launch=1, host=host, port=port, ready=True, rank=place)
after = 0
for number in range(1, 6):
    generation = membership.agree(mine, after, lambda: None)
    print(json.dumps(asdict(generation)), flush=True)
    mine = Candidate(**{**asdict(mine), "was_in": generation.number, "rank": generation.rank_of(name)})
    after = generation.number
sys.stdin.read()
"""


@pytest.mark.slow
def test_processes_that_race_to_propose_all_read_the_same_records(tmp_path: Path) -> None:
    """Nobody waits for its turn: all write the record at the same time."""
    count = 6
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), f"m{number}", str(number), str(count)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(count)
    ]  # fmt: skip
    try:
        seen = [[json.loads(racer.stdout.readline()) for _ in range(5)] for racer in racers if racer.stdout]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    assert all(records == seen[0] for records in seen)
    assert [record["number"] for record in seen[0]] == [1, 2, 3, 4, 5]
    written = [json.loads(json.dumps(dataclasses.asdict(item))) for item in generations(Storage(str(tmp_path)))]
    assert written == seen[0]
