"""Who watches whom in worlds of any size, and who gathers: pure functions, as tables and by chance."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.elastic.overlay import FULL_MESH, TAKEOVER_SECONDS, count_acting, is_partial, neighbours_of
from trainer.elastic.rumours import Rumours


def names(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return [f"n{number}p0-{chance.getrandbits(32):08x}" for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, FULL_MESH])
def test_in_a_small_world_everyone_watches_everyone(count: int) -> None:
    members = names(count)
    assert not is_partial(count)
    assert all(neighbours_of(member, members) == set(members) - {member} for member in members)


@given(st.integers(FULL_MESH + 1, 300), st.integers(0, 1 << 32))
@settings(max_examples=40, deadline=None)
def test_links_are_mutual_and_few_and_survivors_of_any_third_lost_stay_connected(count: int, seed: int) -> None:
    members = names(count, seed)
    links = {member: neighbours_of(member, members) for member in members}
    for member, near in links.items():
        assert member not in near
        assert len(near) <= 2 * math.ceil(math.log2(count))
        assert all(member in links[other] for other in near)
    lost = set(random.Random(seed).sample(members, count // 3))
    alive = set(members) - lost
    assert all(links[member] & alive for member in alive), "somebody is watched by nobody"
    reached, waiting = set(), [min(alive)]
    while waiting:
        member = waiting.pop()
        if member not in reached:
            reached.add(member)
            waiting += links[member] & alive
    assert reached == alive


@given(st.integers(60, 256), st.integers(0, 1 << 32))
@settings(max_examples=20, deadline=None)
def test_a_departure_changes_few_links_of_each(count: int, seed: int) -> None:
    members = names(count, seed)
    left = members[1:]
    changed = [len(neighbours_of(member, members) ^ neighbours_of(member, left)) for member in left]
    assert max(changed) <= 4 * math.ceil(math.log2(count))
    assert sum(changed) / len(left) <= 7


@given(st.integers(20, 256), st.integers(0, 1 << 32), st.integers(4, 12))
@settings(max_examples=40, deadline=None)
def test_a_rack_of_successive_nodes_is_watched_from_outside(count: int, seed: int, size: int) -> None:
    members = names(count, seed)
    rack = set(members[:size])
    assert all(neighbours_of(member, members) - rack for member in rack)


def test_a_newcomer_is_placed_as_if_it_were_in() -> None:
    members = names(40)
    assert neighbours_of("n99p0-new", members) == neighbours_of("n99p0-new", [*members, "n99p0-new"])


def test_more_and_more_gather_the_longer_nobody_does() -> None:
    assert [count_acting(TAKEOVER_SECONDS * factor) for factor in (0, 0.9, 1, 1.9, 2, 4, 64)] == [1, 1, 2, 2, 3, 4, 8]


def test_what_is_known_is_passed_on_once() -> None:
    rumours = Rumours()
    rumours.begin(4)
    told = {"lost": {"a": "gone"}, "of": 4, "from": "x"}
    assert rumours.take(told, "x") == told
    assert rumours.take(told, "y") is None
    both = rumours.take({"lost": {"a": "silent", "b": "silent"}, "of": 4, "from": "y"}, "y")
    assert both is not None
    assert both["lost"] == {"b": "silent"}
    assert rumours.lost() == {"a": "gone", "b": "silent"}
    assert rumours.take({"lost": {"c": "gone"}, "of": 3}, "y") is None, "of a generation that is over"
    assert rumours.take({"lost": {"c": "gone"}, "of": 5}, "y") is not None, "this process is behind"
    assert rumours.take({"lost": {"c": "gone"}, "of": 4000}, "y") is None
    assert rumours.take({"regroup": 4}, "y") == {"regroup": 4}
    assert rumours.take({"regroup": 4, "reason": "another"}, "x") is None
    assert rumours.take({"gather": 5, "by": "a"}, "near") is not None
    assert rumours.take({"gather": 5, "by": "a"}, "far") is None
    assert rumours.ways == {(5, "a"): "near"}
    assert rumours.take({"formed": 5}, "x") is not None
    assert rumours.take({"formed": 5}, "y") is None
    rumours.begin(5)
    assert rumours.lost() == {"c": "gone"}
    assert rumours.ways == {}
    assert [rumours.take(message, "x") for message in ({"regroup": 4}, {"other": 1}, {"lost": 5, "of": 5})] == [
        None
    ] * 3
