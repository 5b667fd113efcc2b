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
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from trainer.comm.channel import ADMITTED, Channel, PeerError, authenticate_caller

if TYPE_CHECKING:
    from trainer.comm.tls import TLSContexts

MOST_UNPROVEN = 128
"""The most connections that have not yet authenticated. When there is one more, the oldest is closed: a member needs a
millisecond, so it is hardly ever the oldest, and if it is closed it connects again."""
SPEAK_SECONDS = 1.0
"""The seconds that each of them has to authenticate."""
TLS_SECONDS = 4.0
"""Additional seconds if TLS comes first."""
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

    channel: Channel
    flow: Generator[int, None, T | None]
    address: str
    until: float
    events: int = select.POLLIN | select.POLLOUT


@dataclass
class Door(Generic[T]):
    """An authenticator of incoming connections that handles several at once, in the name ``me``.

    ``check`` returns the facts about a caller of this proven name, or raises `PeerError` with why it is not wanted, or
    `trainer.comm.handshake.AuthenticationError`. The caller hears the reason (`trainer.comm.channel.connect`)."""

    listener: socket.socket
    key: bytes
    me: str
    check: Callable[[str], T]
    tls: TLSContexts | None = None
    refused: list[str] = field(default_factory=list)
    """The reasons for which the latest ones were turned away."""
    _guests: OrderedDict[int, _Guest[T]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.listener.setblocking(False)

    def next(self, until: float) -> tuple[Channel, T]:
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
            self._guests.popitem()[1].channel.close()

    def _welcome(self, channel: Channel) -> Generator[int, None, T]:
        facts = self.check((yield from authenticate_caller(channel, self.key, self.me, self.tls)))
        yield from channel.send(ADMITTED)
        return facts

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
        channel = Channel(-1, connection)
        try:
            address = str(connection.getpeername()[0])
        except OSError:
            address = "somebody"
        until = time.monotonic() + SPEAK_SECONDS + (TLS_SECONDS if self.tls else 0.0)
        self._guests[connection.fileno()] = _Guest(channel, self._welcome(channel), address, until)
        return False

    def _go_on(self, number: int) -> tuple[Channel, T] | None:
        """Continue with one guest as far as possible without waiting; return its channel and facts once it is
        admitted."""
        guest = self._guests.get(number)
        if guest is None:  # turned away a moment ago
            return None
        try:
            guest.events = next(guest.flow)
        except StopIteration as done:
            del self._guests[number]
            if done.value is None:  # it has heard why not
                guest.channel.close()
                return None
            return guest.channel, done.value
        except (OSError, PeerError) as error:
            self._note(guest, str(error) or type(error).__name__)
            tells = isinstance(error, PeerError)
            guest.flow = guest.channel.refuse(None, str(error)) if tells else guest.channel.leave()
            guest.events = select.POLLIN | select.POLLOUT  # at once
        return None

    def _turn_away(self, number: int, why: str) -> None:
        guest = self._guests.pop(number)
        self._note(guest, why)
        guest.channel.close()

    def _note(self, guest: _Guest[T], why: str) -> None:
        self.refused.append(f"{guest.address} was turned away: {why}")
        del self.refused[:-8]


def check_rank(name: str, size: int, channels: Collection[int] = (), above: int = -1) -> int:
    """Return the rank of a caller's name. Raise `PeerError` for one outside a world of ``size``, not ``above`` that
    rank, or in ``channels`` already."""
    if not (name.isascii() and name.isdecimal() and len(name) < 10 and int(name) < size):
        raise PeerError(None, f"it claims to be rank {name[:20]!r} in a world of {size}")
    if int(name) <= above:
        raise PeerError(None, f"rank {name} is not expected here")
    if int(name) in channels:
        raise PeerError(None, f"rank {name} is already connected")
    return int(name)


def admit_ranks(door: Door[int], channels: dict[int, Channel], count: int, until: float) -> None:
    """Put the channel of each rank that is admitted into ``channels``, until they are ``count``, and close the door.
    Raise TimeoutError if they do not come in time, another OSError if the listener fails."""
    try:
        while len(channels) < count:
            channel, rank = door.next(until)
            if rank in channels:  # two came at once
                channel.close()
                continue
            channel.peer, channels[rank] = rank, channel
    finally:
        door.close()
