"""Who is in the next generation: the decisions as tables and by chance."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from crowd import generation, seat
from hypothesis import given
from hypothesis import strategies as st

from trainer.comm.launch_secret import read_launch_secret
from trainer.comm.launcher_env import RankFacts
from trainer.config import DistributedTrainingConfig
from trainer.elastic.dynamic_rendezvous import form_world
from trainer.elastic.generation import (
    COORDINATORS,
    FULL_MESH,
    START,
    TAKEOVER_SECONDS,
    TOLD,
    Candidate,
    Generation,
    choose_generation,
    count_acting,
    count_failed_attempts,
    find_isolated_members,
    find_missing_members,
    find_unreachable_pairs,
    proposal_delay,
    refuse_mixed_encryption,
    survivors_of,
    watched_by,
)
from trainer.errors import ConfigError

RETRIES = 3


def test_everyone_watches_everyone_and_of_many_few_watch_all_and_are_watched_by_all() -> None:
    small, large = [f"m{number}" for number in range(FULL_MESH)], [f"m{number}" for number in range(40)]
    assert all(watched_by(member, small) == set(small) - {member} for member in small)
    first = set(large[:COORDINATORS])
    assert all(watched_by(member, large) == set(large) - {member} for member in first)
    assert all(watched_by(member, large) == first for member in [*large[COORDINATORS:], "a newcomer"])


def test_more_and_more_act_the_longer_nobody_does() -> None:
    assert [count_acting(TAKEOVER_SECONDS * factor) for factor in (0, 0.9, 1, 1.9, 2, 4, 64)] == [1, 1, 2, 2, 3, 4, 8]


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
    result = choose_generation(previous, 1, found, RETRIES, limit, proposer)
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
    result = choose_generation(previous, 1, [seat("z", was_in=3, step=99), *survivors], RETRIES, 9)
    assert result is not None
    assert result.members[-1].was_in == 0, "a state of a generation that is over does not count"
    assert result.step == 0


def test_a_launch_starts_anew_and_a_number_is_never_used_again() -> None:
    previous = replace(generation("ab"), launch=0)
    result = choose_generation(previous, 1, [seat("c", 1), seat("b", 0)], RETRIES, 9)
    assert result is not None
    assert (result.number, result.reason, result.has_state) == (5, START, False)
    assert [item.member for item in result.members] == ["b", "c"]
    first = choose_generation(None, 1, [seat("a")], RETRIES, 9, first=7)
    assert first is not None
    assert first.number == 7
    assert choose_generation(None, 1, [seat("a", ready=False)], RETRIES, 9) is None


def test_the_state_of_the_furthest_counts_the_lowest_rank_of_equals() -> None:
    seats = (seat("a", was_in=4, step=7), seat("b", was_in=4, step=8), seat("c", was_in=4, step=8), seat("d", step=99))
    four = Generation(number=5, launch=1, members=seats)
    assert (four.source, four.has_state, four.behind) == (1, True, (0, 3))
    evaluated = replace(four, members=(*seats[:2], replace(seats[2], progress=8)))
    assert evaluated.source == 2
    assert replace(four, members=seats[1:3]).behind == ()
    assert replace(four, members=(seat("a"), seat("b"))).behind == (0, 1), "newcomers have no state to be equal in"


def test_reasons_are_those_of_who_saw_it() -> None:
    found = candidates("abc")
    said = [replace(found[0], reason="x is gone"), replace(found[1], reason=f"{TOLD} a: x is gone"), found[2]]
    result = choose_generation(generation("abcx"), 1, said, RETRIES, 9)
    assert result is not None
    assert result.reason == "x is gone"


@pytest.mark.parametrize(
    ("names", "cut", "cut_off"),
    [("abc", "", ""), ("abc", "ab", ""), ("abc", "ab ac", "a"), ("ab", "ab", ""), ("abc", "ab ac bc", "")],
)
def test_only_a_host_that_nobody_reaches_is_cut_off(names: str, cut: str, cut_off: str) -> None:
    assert find_isolated_members(candidates(names, cut)) == set(cut_off)


def test_one_of_two_is_believed_that_says_it_cannot_reach_the_other() -> None:
    one, other = seat("a", view={"b": "gone", "x": "gone"}), seat("b", view={"a": "here"})
    assert find_unreachable_pairs([one, other]) == {frozenset("ab")}
    assert find_unreachable_pairs([replace(one, view={"b": "unknown"}), other]) == set()


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
    assert count_failed_attempts(previous, found) == count
    assert proposal_delay(previous, found, RETRIES) == seconds
    result = choose_generation(previous, 1, found, RETRIES, 9)
    assert result is not None
    assert (result.attempt, result.topology) == (count, "star" if count > RETRIES else "mesh")


def test_a_link_that_is_cut_is_given_time_to_come_back_but_not_a_host() -> None:
    previous = generation("abc")
    assert proposal_delay(previous, candidates("abc", "ab"), RETRIES) == 3.5
    assert proposal_delay(previous, candidates("abc", "ab ac"), RETRIES) == 0.0
    assert proposal_delay(previous, candidates("abc", "ab ac bc"), RETRIES) == 3.5


def test_whom_a_proposal_waits_for() -> None:
    preparing = seat("b", ready=False)
    assert find_missing_members(generation("abc"), 1, 3, [seat("a"), preparing]) == ["b", "c"]
    assert find_missing_members(None, 1, 4, [seat("a"), preparing, seat("x", launch=2)]) == ["b", "?0", "?1"]
    assert find_missing_members(replace(generation("xyz"), launch=0), 1, 1, [seat("a")]) == []


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
    result = choose_generation(previous, 1, found, RETRIES, limit, proposer)
    if not ready:
        assert result is None
        return
    assert result is not None, "somebody is there: the training must go on"
    names = [item.member for item in result.members]
    assert set(names) <= {item.member for item in ready}
    assert len(set(names)) == len(names) > 0
    assert result.number == (previous.number + 1 if previous else 1)

    bad = find_unreachable_pairs(result.members)
    if result.topology == "star":
        bad = {pair for pair in bad if names[0] in pair}
    assert not bad, "they reach each other, or all of them reach the server"

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
    assert choose_generation(previous, 1, found[::-1], RETRIES, limit, proposer) == result, (
        "in whatever order they are read"
    )


def test_members_that_encrypt_differently_are_refused() -> None:
    mine, same, other = (
        Candidate(member=name, node=0, local_rank=0, launch=2, host="10.0.0.1", port=1, certificates=certificates)
        for name, certificates in (("a", "launch"), ("b", "launch"), ("c", ""))
    )
    refuse_mixed_encryption(mine, None, [mine, same])
    with pytest.raises(ConfigError, match=r"c at 10.0.0.1 does not encrypt.*must be the same on all nodes"):
        refuse_mixed_encryption(mine, None, [mine, same, other])
    with pytest.raises(ConfigError, match=r"this process, c at 10.0.0.1, does not encrypt"):
        refuse_mixed_encryption(other, None, [mine, same, other])
    old = Generation(number=1, launch=1, members=(replace(other, launch=1),))
    refuse_mixed_encryption(mine, old, [mine, replace(other, launch=1)])
    working = Generation(number=1, launch=2, members=(mine, same))
    refuse_mixed_encryption(mine, working, [mine, same, other])  # a newcomer stops none of them
    with pytest.raises(ConfigError, match="this process, c"):
        refuse_mixed_encryption(other, working, [other])


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([(0, 0), (0, 1)], "local rank 0 of node 0 and local rank 1 of node 0 use the same GPU (GPU-a)"),
        ([(0, 0), (0, 0)], ""),  # a node's new incarnation beside its dead one, which is lost at the first collective
    ],
)
def test_members_that_share_a_gpu_refuse_to_train(places: list[tuple[int, int]], words: str) -> None:
    members = tuple(
        Candidate(member=f"m{number}", node=node, local_rank=local_rank, launch=1, host="127.0.0.1", port=1, gpu=True,
                  gpu_name="GPU-a")
        for number, (node, local_rank) in enumerate(places)
    )  # fmt: skip
    formed, config = Generation(number=1, launch=1, members=members), DistributedTrainingConfig()
    with pytest.raises(ConfigError) if words else nullcontext() as refused:
        world = form_world(
            formed, "m1", RankFacts(), torch.device("cpu"), socket.socket(), config, "job", read_launch_secret({})
        )
        assert world.group is not None
        world.group.fail("the test is over")  # else its end would be waited for
        world.close()
    assert refused is None or words in str(refused.value)
