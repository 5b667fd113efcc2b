"""Who watches whom in worlds of any size, and who gathers: pure functions, as tables and by chance."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.elastic.mailbox import Mailbox, Rumours
from trainer.elastic.overlay import FULL_MESH, TAKEOVER_SECONDS, count_acting, is_partial, neighbours_of


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


def test_all_are_told_that_there_is_a_loss_and_who_is_first_and_no_more() -> None:
    mail = Mailbox("c")
    mail.enter(4, "abcdef", passes_on=True)
    assert mail.tell_losses({}) is None
    told = json.loads(mail.tell_losses({"e": "gone"}) or b"")
    assert told == {"lost": {"e": "gone"}, "of": 4, "from": "c"}
    assert mail.tell_losses({"f": "gone", "x": "gone"}) is None, "the one that gathers learns it from letters"
    assert mail.hear({"lost": {"b": "silent"}, "of": 4, "from": "a"}, "a") == (True, None)
    assert mail.tell_losses({}) is None
    assert mail.hear({"lost": {"a": "gone"}, "of": 4, "from": "d"}, "d") == (True, None)
    told = json.loads(mail.tell_losses({}) or b"")
    assert told["lost"] == {"a": "gone", "b": "silent", "e": "gone", "f": "gone"}, "c is the first now, and why"
    mail.enter(5, "cd", passes_on=True)
    assert mail.tell_losses({"d": "gone"}) is not None
    mail.tells_losses = False
    mail.enter(6, "cd", passes_on=True)
    assert mail.tell_losses({"d": "gone"}) is None, "its end is no loss"


def test_the_word_that_a_record_is_written_goes_back_on_the_ways_of_the_letters() -> None:
    mail = Mailbox("c")
    mail.enter(4, "abcdef", passes_on=True)
    links = ["a", "b", "d", "newcomer"]
    assert mail.hear({"gather": 5, "by": "a", "from": "a"}, "b")[0]
    letter = {"candidacy": 5, "to": "a", "from": "e", "candidate": {}}
    assert mail.put_letter(letter, "d") == "b"
    assert mail.put_letter(letter | {"candidacy": 4000}, "a") == "", "of no generation that is near"
    formed = {"formed": 5, "back": True, "from": "a"}
    is_news, line = mail.hear(formed, "b")
    assert is_news
    assert json.loads(line or b"") == formed
    assert mail.choose_readers(formed, links) == ["d", "newcomer"]
    assert mail.choose_readers({"formed": 5}, links) == links, "from one that no letters have reached"
    assert mail.hear(formed, "d") == (False, None)
    own = json.loads(mail.tell({"formed": 5, "x": 1}) or b"{}")
    assert own == {}, "it has passed that on already"
