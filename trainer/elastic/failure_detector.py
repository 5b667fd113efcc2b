"""Failure detection: a connection to each watched member, a heartbeat over it, and short messages.

A process that dies closes its connections, and its port refuses new ones: it is *gone*, known within a millisecond. A
process that is frozen or cut off says nothing: it is *silent* once its silence is out of proportion to those before
(`trainer.elastic.peer`), or at the latest after ``timeout`` seconds. All of it runs on one thread with an event
loop, in a process beside that of the training (`trainer.elastic.peer_watch`).

A message goes to all who watch this process. It only wakes them and says where to look: what counts is the record in
the storage (`trainer.elastic.membership`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainer.comm.handshake import AuthenticationError
from trainer.comm.listener import BACKLOG
from trainer.comm.tls import TLSContexts
from trainer.elastic.generation import is_large
from trainer.elastic.peer import (
    CONNECT_SECONDS,
    LEAST_BEATS,
    Address,
    Doorkeeper,
    PeerStatus,
    SignsOfLife,
    WatchedPeer,
    admit_peer,
    connect_peer,
)

CANCEL_SECONDS = 0.1
"""The pause before tasks that have not ended are cancelled again."""
RETRY_SECONDS = 0.1
MOST_DOUBLED = 5
"""In a large world the pause before another attempt doubles so often: all its members may try the same one."""
MEMBERS_PER_BEAT = 256
"""Members of a world in which the interval between two beats holds; in a larger one it is longer, so that beats do not
load those who watch all."""
MEMBERS_PER_SECOND = 128
"""Members of a large world for each second over which its new connections are made: when a generation begins, all have
better to do. So much longer is a connection waited for, too."""
DROPPED_OFTEN = 5
"""After this many connections in a row that were closed without an answer, another process owns the port. One or two
may have been closed because the listener was busy with others."""
_log = logging.getLogger(__name__)


class Inbox:
    """What other members have told this process. Any thread may use it."""

    def __init__(self) -> None:
        self.formed = 0
        """The newest generation of which another has said that its record is written."""
        self._messages: list[dict[str, Any]] = []
        self._news = threading.Event()

    def take_messages(self) -> list[dict[str, Any]]:
        """Return the messages that have come since the last call."""
        taken = []
        while self._messages:  # each call takes one out: others may put more in
            taken.append(self._messages.pop(0))
        return taken

    def wait_for_news(self, seconds: float) -> None:
        """Wait until a view has changed or a message has come since the last call, at most so many seconds."""
        self._news.wait(seconds)
        self._news.clear()

    def _put(self, message: dict[str, Any]) -> None:
        if isinstance(formed := message.get("formed"), int):
            self.formed = max(self.formed, formed)
        else:
            self._messages.append(message)


class FailureDetector(Inbox):
    """A detector with this process's port and its connections to others. ``key``: the key that only members have; both
    sides of each connection prove it first (`trainer.comm.handshake`). The later messages are encrypted only with
    TLS, see `trainer.comm.tls`.

    ``host``: the address at which it listens, unless ``listening`` is given. ``interval``: seconds between two beats;
    ``timeout``: those of a silence that is always too long; ``adapts`` False: only that counts. ``on_change`` is called
    without arguments, on the loop's thread, whenever a view changes or a message has come; it must return at once.
    ``tls``: None for plain connections.
    """

    def __init__(
        self,
        me: str,
        key: bytes,
        host: str,
        interval: float,
        timeout: float,
        tls: TLSContexts | None = None,
        on_change: Callable[[], None] = lambda: None,
        adapts: bool = False,
        listening: socket.socket | None = None,
    ) -> None:
        super().__init__()
        self.me, self.key, self.interval, self.timeout = me, key, interval, timeout
        self.on_change, self.adapts = on_change, adapts
        self._tls = tls
        self._peers: dict[str, WatchedPeer] = {}
        self._followers: dict[asyncio.StreamWriter, str] = {}
        """The connections that others have made, with their proven names."""
        self._members = 0
        self.is_mute = False
        """Whether this process gives no sign of life now."""
        self.sent_lines = 0
        """The beats, answers and messages that this process has sent."""
        self._lock = threading.Lock()
        listening = listening or open_port(host)
        listening.setblocking(False)
        self.address: Address = listening.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._door = Doorkeeper(self._loop, listening, self._serve)
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    def follow(self, addresses: Mapping[str, Address]) -> None:
        """Watch exactly these members from now on, except this process itself."""
        wanted = {member: address for member, address in addresses.items() if member != self.me}
        with self._lock:
            for member in set(self._peers) - set(wanted):
                self._cancel(self._peers.pop(member))
            for member in set(wanted) - set(self._peers):
                peer = WatchedPeer(wanted[member], SignsOfLife(self.interval))
                self._peers[member] = peer
                self._loop.call_soon_threadsafe(self._start, member, peer)

    def expect(self, members: int) -> None:
        """Be ready for a world of so many members, all of which may call at once."""
        self._members = members
        self._door.most_unproven = max(self._door.most_unproven, members)

    def statuses(self) -> dict[str, PeerStatus]:
        """Return the status of each followed member as this process sees it."""
        with self._lock:
            return {member: peer.view for member, peer in self._peers.items()}

    def seconds_since_heard(self) -> dict[str, float]:
        """Return the seconds since each followed member was last heard."""
        now = time.monotonic()
        with self._lock:
            return {member: now - peer.heard_at for member, peer in self._peers.items()}

    def broadcast(self, message: Mapping[str, Any]) -> None:
        """Send a message to all followers of this process, without an answer or a guarantee of delivery."""
        line = line_of({**message, "from": self.me})
        self._loop.call_soon_threadsafe(self._send, line)

    def close(self) -> None:
        """Stop the thread; its connections end with it."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)

    # Everything below runs on the loop's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._door.open()
        self._loop.create_task(self._judge())
        try:
            self._loop.run_forever()
        finally:
            self._door.close()
            while tasks := asyncio.all_tasks(self._loop):
                for task in tasks:  # again and again: `asyncio.wait_for` of Python 3.11 may lose a cancellation
                    task.cancel()
                ended, _ = self._loop.run_until_complete(asyncio.wait(tasks, timeout=CANCEL_SECONDS))
                for task in ended:
                    if not task.cancelled():
                        task.exception()  # which would be logged otherwise
            for writer in list(self._followers):
                writer.transport.abort()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    def _start(self, member: str, peer: WatchedPeer) -> None:
        peer.task = self._loop.create_task(self._follow(member, peer))

    def _cancel(self, peer: WatchedPeer) -> None:
        def cancel() -> None:
            if peer.task:
                peer.task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    def _notify(self) -> None:
        self._news.set()
        self.on_change()

    def _send(self, line: bytes) -> None:
        for writer in self._followers:
            if not writer.is_closing():
                writer.write(line)
                self.sent_lines += 1

    def _take(self, line: bytes) -> None:
        """Take in an answer to a beat, or a message."""
        value = json.loads(line)
        if not isinstance(value, dict):
            raise ValueError("a line is an object")
        if "member" in value:
            return
        self._put(value)
        self._notify()

    async def _serve(self, connection: socket.socket) -> None:
        """Serve one follower: once it is authenticated, answer each of its beats with one. Between two that watch each
        other one beat is enough."""
        writer, task = None, asyncio.current_task()
        assert task is not None
        try:
            reader, writer, caller = await admit_peer(connection, self.key, self.me, self._tls)
            self._door.admit(task)
            self._followers[writer] = caller
            answer = line_of({"member": self.me})
            if not self.is_mute:
                writer.write(answer)
            while await reader.readline():
                if self.is_mute:
                    continue
                if (peer := self._peers.get(caller)) is not None and peer.is_connected:
                    self._set(caller, peer, "here")
                writer.write(answer)
                self.sent_lines += 1
                await writer.drain()
        except (TimeoutError, OSError, ValueError, EOFError, asyncio.CancelledError):
            pass
        finally:
            if writer is not None:
                self._followers.pop(writer, None)
                writer.transport.abort()

    async def _follow(self, member: str, peer: WatchedPeer) -> None:
        """Hold a connection and reconnect when it breaks, at once the first time: a dead process refuses it."""
        if is_large(self._members):
            await asyncio.sleep(random.random() * self._members / MEMBERS_PER_SECOND)
        failures = 0
        while True:
            heard_at = peer.heard_at
            try:
                await self._converse(member, peer)
            except (ConnectionRefusedError, AuthenticationError):
                self._set(member, peer, "gone")
            except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
                peer.dropped += 1
                if peer.dropped >= DROPPED_OFTEN:
                    self._set(member, peer, "gone")
            except (TimeoutError, OSError, ValueError):
                if peer.view == "unknown":
                    self._set(member, peer, "silent")
            failures = failures + 1 if peer.heard_at == heard_at else 0
            doubled = 2 ** min(failures - 1, MOST_DOUBLED) if is_large(self._members) else 1
            await asyncio.sleep(RETRY_SECONDS * doubled if failures else 0)

    async def _converse(self, member: str, peer: WatchedPeer) -> None:
        """Connect, and read until the connection ends. Returns or raises when it has."""
        seconds = CONNECT_SECONDS + (self._members / MEMBERS_PER_SECOND if is_large(self._members) else 0.0)
        reader, writer = await connect_peer(peer.address, self.key, self.me, member, self._tls, seconds)
        beating = self._loop.create_task(self._beat(peer, writer))
        try:
            peer.dropped = 0
            # The first line says that the other side has admitted this process.
            line = await asyncio.wait_for(reader.readline(), seconds)
            peer.is_connected = bool(line)
            while line:
                self._set(member, peer, "here")
                self._take(line)
                line = await reader.readline()
        finally:
            peer.is_connected = False
            beating.cancel()
            writer.transport.abort()

    async def _beat(self, peer: WatchedPeer, writer: asyncio.StreamWriter) -> None:
        """Ask a peer for a sign of life at each beat, unless it has just given one."""
        while True:
            await asyncio.sleep(self._pause())
            if not self.is_mute and time.monotonic() - peer.heard_at > self._pause() / 2:
                writer.write(b"\n")
                self.sent_lines += 1

    def _pause(self) -> float:
        """Return the seconds between two beats to one peer."""
        return self.interval * max(1.0, self._members / MEMBERS_PER_BEAT)

    async def _judge(self) -> None:
        """Mark members as silent that have not been heard for too long. After a pause of this process itself (a frozen
        host, a debugger, a machine with too much work) the time starts again for all: this process did not listen."""
        nap = min(self.interval, self.timeout) / 4
        while True:
            before = time.monotonic()
            await asyncio.sleep(nap)
            now = time.monotonic()
            shortest = min(self.timeout, LEAST_BEATS * self._pause()) if self.adapts else self.timeout
            for member, peer in list(self._peers.items()):
                if now - before - nap > shortest / 4:
                    peer.heard_at = now
                    peer.signs.forgive(now)
                elif peer.view == "here" and peer.is_overdue(now, self._pause(), self.timeout, self.adapts):
                    _log.warning("nothing heard from %s for %.1f s", member, now - peer.heard_at)
                    self._set(member, peer, "silent")

    def _set(self, member: str, peer: WatchedPeer, view: PeerStatus) -> None:
        if view == "here":
            peer.heard_at = time.monotonic()
            peer.signs.hear(peer.heard_at)
        if peer.view != view and self._peers.get(member) is peer:
            peer.view = view
            self._notify()


def open_port(host: str) -> socket.socket:
    """Return a socket that listens at a free port of this host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=BACKLOG)


def line_of(message: Mapping[str, Any]) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(message).encode() + b"\n"
