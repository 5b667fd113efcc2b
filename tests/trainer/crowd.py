"""Candidates and generations; and members that agree, each on a thread with peers of its own, on a real folder."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.elastic.failure_detector import Address, FailureDetector
from trainer.elastic.generation import Candidate, Generation
from trainer.elastic.membership import Membership
from trainer.storage.open import open_storage


def seat(name: str, place: int = 0, **what: Any) -> Candidate:
    """A candidate that is ready, of launch 1."""
    fields: dict[str, Any] = {"node": place, "local_rank": 0, "launch": 1, "host": "h", "port": 1, "ready": True}
    return Candidate(member=name, **{**fields, "rank": place, **what})


def generation(names: str, number: int = 4, **what: Any) -> Generation:
    members = tuple(seat(name, place) for place, name in enumerate(names))
    return Generation(number=number, launch=1, members=members, **what)


class Line(FailureDetector):
    """Peers whose connections to some lead nowhere: to an address that takes them and never says a word."""

    def __init__(self, name: str, interval: float, timeout: float) -> None:
        self.known: dict[str, Address] = {}
        self.cut: set[str] = set()
        self.nowhere = socket.create_server(("127.0.0.1", 0))
        super().__init__(name, b"key", "127.0.0.1", interval, timeout)

    def follow(self, addresses: Mapping[str, Address]) -> None:
        self.known = dict(addresses)
        nowhere = {member: self.nowhere.getsockname() for member in self.cut & set(self.known)}
        super().follow(self.known | nowhere)

    def cut_off(self, member: str) -> None:
        known = self.known
        self.follow({name: address for name, address in known.items() if name != member})  # ends the connection
        self.cut.add(member)
        self.follow(known)
        if member in known:  # the timeout is not waited for
            self._loop.call_soon_threadsafe(self._set, member, self._peers[member], "silent")

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

    def __init__(
        self, name: str, folder: Path, place: int, planned: int = 3, patience: float = 60.0, limit: int = 8
    ) -> None:
        self.peers = Line(name, 0.1, 3.0)
        self.membership = Membership(
            open_storage(str(folder)),
            self.peers,
            1,
            planned,
            limit=limit,
            retries=0,
            patience=patience,
            start_patience=patience,
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
                self.result = self.membership.agree_on_next(mine, number, self.ended)
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
        self._thread.join(0.5)
        return self._thread.is_alive()

    def close(self) -> None:
        self.over.set()
        self._thread.join(10) if self._thread.ident else None
        self.peers.close()


def together(crowd: list[Node], after: Generation | None = None, **what: Any) -> Generation:
    """What these agree on, all the same."""
    for node in crowd:
        node.start(after, **what)
    found = [node.wait() for node in crowd]
    assert all(item == found[0] for item in found)
    return found[0]


def names_of(found: Generation) -> str:
    return "".join(item.member for item in found.members)
