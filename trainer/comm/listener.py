"""Accepting connections: how many may be unauthenticated at once, for how long, and how an accept can fail.

A stranger can always connect. Strangers must not keep out the ranks of the job, or use up the descriptors of the
process.
"""

from __future__ import annotations

import errno
import math
import select
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trainer.comm.framed_socket import FramedSocket, PeerError

MOST_UNPROVEN = 128
"""The most connections that have not yet authenticated. When there is one more, the oldest is closed: a member needs a
millisecond, so it is hardly ever the oldest, and if it is closed it connects again."""
SPEAK_SECONDS = 1.0
"""The seconds that each of them has to authenticate."""
BACKLOG = 1024
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REST_SECONDS = 0.05
"""The pause before the next accept if there is no room for one more and no unproven connection to close."""
_LATE = "it sent nothing in time"

T = TypeVar("T")


def accept(listener: socket.socket) -> socket.socket | None:
    """Return a connection from a non-blocking listener; None if no connection waits any more. Raise `NoRoomError` if
    the process has no descriptor left."""
    try:
        return listener.accept()[0]
    except (BlockingIOError, ConnectionAbortedError):
        return None
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise NoRoomError(error.errno, error.strerror) from error
        raise


class NoRoomError(OSError):
    """There is no descriptor for another connection. Connections in the queue keep their place."""


@dataclass
class _Guest(Generic[T]):
    """A connection that is being authenticated, and its flow."""

    link: FramedSocket
    flow: Generator[int, None, T | None]
    address: str
    until: float
    events: int = select.POLLIN | select.POLLOUT


@dataclass
class Door(Generic[T]):
    """An authenticator of incoming connections that handles several at once.

    ``welcome``: a flow over the new link that returns the facts about the guest, or raises `PeerError` or OSError.
    ``refuse``: a flow that tells the guest the reason of a `PeerError`.
    """

    listener: socket.socket
    welcome: Callable[[FramedSocket], Generator[int, None, T]]
    speak_seconds: float = SPEAK_SECONDS
    refused: list[str] = field(default_factory=list)
    """The reasons for which the latest ones were turned away."""
    _guests: OrderedDict[int, _Guest[T]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.listener.setblocking(False)

    def next(self, until: float) -> tuple[FramedSocket, T]:
        """Return the next authenticated guest. Raise TimeoutError at ``until`` (of `time.monotonic`), OSError if the
        listener fails."""
        while True:
            now = time.monotonic()
            if now >= until:
                raise TimeoutError("nobody connected in time")
            for number, guest in list(self._guests.items()):
                if now >= guest.until:
                    self._turn_away(number, _LATE)
            poll, full = select.poll(), False
            poll.register(self.listener, select.POLLIN)
            for number, guest in self._guests.items():
                poll.register(number, guest.events)
            wake_at = min([until, *(guest.until for guest in self._guests.values())])
            for number, _ in poll.poll(max(0, math.ceil(1000 * (wake_at - now)))):
                if number == self.listener.fileno():
                    full = self._take()
                elif (come := self._go_on(number)) is not None:
                    return come
            if full:
                time.sleep(_REST_SECONDS)

    def close(self) -> None:
        """Close the connections that are still unauthenticated. The listener stays open."""
        while self._guests:
            self._guests.popitem()[1].link.connection.close()

    def _take(self) -> bool:
        """Accept one connection from the queue. Return True if there is no room and no guest to turn away."""
        try:
            connection = accept(self.listener)
        except NoRoomError:
            if not self._guests:
                return True
            self._turn_away(next(iter(self._guests)), "no file descriptor is left")
            return False
        if connection is None:
            return False
        if len(self._guests) >= MOST_UNPROVEN:
            self._turn_away(next(iter(self._guests)), "too many connected at once")
        link = FramedSocket(-1, connection)
        try:
            address = str(connection.getpeername()[0])
        except OSError:
            address = "somebody"
        until = time.monotonic() + self.speak_seconds
        self._guests[connection.fileno()] = _Guest(link, self.welcome(link), address, until)
        return False

    def _go_on(self, number: int) -> tuple[FramedSocket, T] | None:
        """Continue with one guest as far as possible without waiting; return its link and facts once it is admitted."""
        guest = self._guests.get(number)
        if guest is None:  # turned away a moment ago
            return None
        try:
            guest.events = next(guest.flow)
        except StopIteration as done:
            del self._guests[number]
            if done.value is None:  # it has heard why not
                guest.link.connection.close()
                return None
            return guest.link, done.value
        except (OSError, PeerError) as error:
            self._note(guest, str(error) or type(error).__name__)
            guest.flow = guest.link.refuse(None, str(error)) if isinstance(error, PeerError) else guest.link.leave()
            guest.events = select.POLLIN | select.POLLOUT  # at once
        return None

    def _turn_away(self, number: int, why: str) -> None:
        guest = self._guests.pop(number)
        self._note(guest, why)
        guest.link.connection.close()

    def _note(self, guest: _Guest[T], why: str) -> None:
        self.refused.append(f"{guest.address} was turned away: {why}")
        del self.refused[:-8]
