"""A member as this process sees it: connections on which both sides have proved who they are, on an event loop, and the
length of a silence that is too long.

The latter is the φ accrual failure detector, after N. Hayashibara, X. Défago, R. Yared, T. Katayama (SRDS 2004). What
is said over connections belongs in `trainer.elastic.failure_detector`; the proof itself in `trainer.comm.handshake`.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Literal

from trainer.comm.handshake import HELLO, PROOF_BYTES, REPLY, Caller, Listener
from trainer.comm.listener import MOST_UNPROVEN, SPEAK_SECONDS, TLS_SECONDS, NoRoomError, accept
from trainer.comm.tls import TLSContexts

PeerStatus = Literal["unknown", "here", "gone", "silent"]
Address = tuple[str, int]

SUSPICION = 12.0
"""The φ from which a member is silent: one live peer in 10¹² would be, were gaps normally distributed."""
LEAST_BEATS = 5
"""Beats that have to be missing besides."""
WINDOW = 200
"""Number of the last gaps between two signs of life that count."""
LEAST_GAPS = 8
"""Gaps after which the past says something."""
CONNECT_SECONDS = 3.0
REST_SECONDS = 0.1
"""The pause before the next accept if there is no descriptor left and no unproven connection to close."""


class SignsOfLife:
    """The signs of life of one peer, and how likely its present silence is. Times are seconds of one clock that does
    not jump, such as `time.monotonic`."""

    def __init__(self, expected_gap: float) -> None:
        """``expected_gap``: seconds between two signs, where nothing delays them."""
        self.expected_gap = expected_gap
        self.heard_at: float | None = None
        self._gaps: deque[float] = deque(maxlen=WINDOW)
        self._sum = self._squares = 0.0

    def hear(self, at: float) -> None:
        """Note a sign of life."""
        if self.heard_at is not None:
            self._note(max(0.0, at - self.heard_at))
        self.heard_at = at

    def forgive(self, at: float) -> None:
        """Begin anew at this time without a gap: nobody listened meanwhile."""
        self.heard_at = at

    def silence(self, now: float) -> float:
        """Return the seconds since the last sign; 0 before the first."""
        return 0.0 if self.heard_at is None else max(0.0, now - self.heard_at)

    def phi(self, now: float) -> float:
        """Return minus the decimal logarithm of the chance that a live peer is silent for as long as this one is now: 1
        is a chance of one in ten, 8 of one in a hundred million. Gaps count as normally distributed; what is known of
        them is mixed with what is expected, so that a short or a very regular past makes nobody certain. 0 before the
        first sign."""
        if self.heard_at is None:
            return 0.0
        count = len(self._gaps)
        mean, deviation = self.expected_gap, self.expected_gap / 2
        if count >= LEAST_GAPS:
            mean = max(mean, self._sum / count)
            deviation = max(deviation, math.sqrt(max(0.0, self._squares / count - (self._sum / count) ** 2)))
        return tail_of((self.silence(now) - mean) / deviation)

    def _note(self, gap: float) -> None:
        if len(self._gaps) == self._gaps.maxlen:
            oldest = self._gaps[0]
            self._sum, self._squares = self._sum - oldest, self._squares - oldest * oldest
        self._gaps.append(gap)
        self._sum, self._squares = self._sum + gap, self._squares + gap * gap


def tail_of(deviations: float) -> float:
    """Return minus the decimal logarithm of the chance that a normally distributed value lies this many standard
    deviations above its mean, or further."""
    if deviations > 30.0:  # where the chance itself is no float any more: its known asymptote
        return (deviations**2 / 2 + math.log(deviations * math.sqrt(2 * math.pi))) / math.log(10)
    return -math.log10(math.erfc(deviations / math.sqrt(2)) / 2)


@dataclass(slots=True)
class WatchedPeer:
    """A member that this process watches, with the connection to it."""

    address: Address
    signs: SignsOfLife
    view: PeerStatus = "unknown"
    heard_at: float = field(default_factory=time.monotonic)
    dropped: int = 0
    task: asyncio.Task[None] | None = None
    is_connected: bool = False

    def is_overdue(self, now: float, pause: float, timeout: float, adapts: bool) -> bool:
        """Return whether it has been silent for too long: longer than ``timeout``, or, where detection ``adapts``, out
        of proportion to its silences before. ``pause``: seconds between two beats; ``now``: of `time.monotonic`."""
        silence = now - self.heard_at
        if silence > timeout or not adapts:
            return silence > timeout
        self.signs.expected_gap = pause
        return silence > LEAST_BEATS * pause and self.signs.phi(now) > SUSPICION


async def connect_peer(
    address: Address,
    key: bytes,
    me: str,
    member: str,
    tls: TLSContexts | None,
    seconds: float = CONNECT_SECONDS,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection to a member. Raise OSError where there is none within so many ``seconds``, and
    `trainer.comm.handshake.AuthenticationError` where the other side is not that member."""
    context = tls.client if tls else None
    connecting = asyncio.open_connection(*address, ssl=context, server_hostname="" if context else None)
    reader, writer = await asyncio.wait_for(connecting, seconds)
    try:
        caller = Caller(key, me, member)
        writer.write(caller.hello)
        writer.write(caller.answer(await asyncio.wait_for(reader.readexactly(REPLY.size), seconds)))
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


async def admit_peer(
    connection: socket.socket, key: bytes, me: str, tls: TLSContexts | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
    """Return an accepted connection and the proven name of its caller. Raise as `connect_peer` does, within
    `SPEAK_SECONDS`, and `TLS_SECONDS` more where TLS comes first; the connection is closed then."""
    loop, writer = asyncio.get_running_loop(), None
    try:
        async with asyncio.timeout(SPEAK_SECONDS + (TLS_SECONDS if tls else 0.0)):
            reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(reader)
            context = tls.server if tls else None
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            listener = Listener(key, me)
            writer.write(listener.reply(await reader.readexactly(HELLO.size)))
            return reader, writer, listener.admit(await reader.readexactly(PROOF_BYTES))
    except BaseException:
        if writer is None:
            connection.close()
        else:
            writer.transport.abort()
        raise


class Doorkeeper:
    """Accepts connections at a listening socket, and starts ``serve`` for each. Its methods run on the loop's
    thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        serve: Callable[[socket.socket], Coroutine[None, None, None]],
    ) -> None:
        self._loop, self._socket, self._serve = loop, listener, serve
        self._unproven: dict[asyncio.Task[None], socket.socket] = {}
        """In the order in which they came."""
        self.most_unproven = MOST_UNPROVEN

    def open(self) -> None:
        """Begin to accept."""
        self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Accept no more, and close the socket."""
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def admit(self, task: asyncio.Task[None]) -> None:
        """Take the connection of a task for authenticated."""
        self._unproven.pop(task, None)

    def _accept(self) -> None:
        """Accept a connection. Without a free descriptor, close the oldest unauthenticated one, or wait a little."""
        try:
            connection = accept(self._socket)
        except NoRoomError:
            if not self._drop_oldest():
                self._loop.remove_reader(self._socket)
                self._loop.call_later(REST_SECONDS, self._loop.add_reader, self._socket, self._accept)
            return
        if connection is None:
            return
        if len(self._unproven) >= self.most_unproven:
            self._drop_oldest()
        connection.setblocking(False)
        task = self._loop.create_task(self._serve(connection))
        self._unproven[task] = connection
        task.add_done_callback(lambda done: self._unproven.pop(done, None))

    def _drop_oldest(self) -> bool:
        for task in self._unproven:
            del self._unproven[task]
            task.cancel()
            return True
        return False
