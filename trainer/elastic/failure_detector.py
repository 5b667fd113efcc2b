"""Failure detection: a connection to each watched member, a heartbeat over it, and short messages.

A process that dies closes its connections, and its port refuses new ones: it is *gone*, known within a millisecond. A
process that is frozen or cut off says nothing: it is *silent* once its silence is out of proportion to those before
(`phi_accrual`), or at the latest after ``timeout`` seconds. All of it runs on one thread with an event loop, separate
from the training.

A message goes to all who watch this process; in a large world, where few do, each member passes it on (`mailbox`).
There two members that watch each other share one connection, over which both beat unasked.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from trainer.comm.handshake import AuthenticationError
from trainer.comm.listener import BACKLOG
from trainer.comm.tls import TLSContexts
from trainer.elastic.mailbox import LossTelling, Mailbox, line_of
from trainer.elastic.peer_connection import Doorkeeper, admit_peer, connect_peer
from trainer.elastic.watched_peer import LEAST_BEATS, Address, PeerStatus, SignsOfLife, WatchedPeer

RETRY_SECONDS = 0.1
MOST_DOUBLED = 5
"""In a large world the pause before another attempt doubles so often: attempts must not be what keeps a peer busy."""
SHARED_SECONDS = 3.0
"""Seconds in which the other end of a shared connection has to make it, before this one does."""
SPREAD_SECONDS, SPREAD_MEMBERS = 2.0, 128
"""The time over which the new links of a generation are made, at most, and the members for each of its seconds: when a
generation begins, all have better to do."""
MOST_CONNECTING = 3
"""Connections to watched members that are made at a time: all members make theirs when a generation begins."""
PEERS_PER_BEAT = 16
"""Peers for whom the interval between two beats holds; of more, each hears fewer, so that their number does not load
the network."""
DROPPED_OFTEN = 5
"""After this many connections in a row that were closed without an answer, another process owns the port. One or two
may have been closed because the listener was busy with others."""
_NOTHING: Mapping[str, Any] = {}
_log = logging.getLogger(__name__)


class FailureDetector:
    """A detector with this process's port and its connections to others. ``key``: the key that only members have; both
    sides of each connection prove it first (`trainer.comm.handshake`). The later messages are encrypted only with
    TLS, see `trainer.comm.tls`.

    ``interval``: seconds between two beats; ``timeout``: those of a silence that is always too long; ``adapts`` False:
    only that counts. ``on_change`` is called without arguments, on the loop's thread, whenever a view changes or a
    message has come; it must return at once. ``tls``: None for plain connections.
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
    ) -> None:
        self.me, self.key, self.interval, self.timeout = me, key, interval, timeout
        self.on_change, self.adapts = on_change, adapts
        self._tls = tls
        self._peers: dict[str, WatchedPeer] = {}
        self._followers: dict[asyncio.StreamWriter, str] = {}
        """The connections that others have made, with their proven names."""
        self._linked: frozenset[str] = frozenset()
        self._came = asyncio.Event()
        """Set, and replaced, when a connection of another comes or ends."""
        self._connecting = asyncio.Semaphore(MOST_CONNECTING)
        self.mail = Mailbox(me)
        """What others have told, but for `take_messages`."""
        self.sent_lines = 0
        """The beats, answers and messages that this process has sent."""
        self._lock = threading.Lock()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        listening.setblocking(False)
        self.address: Address = listening.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._door = Doorkeeper(self._loop, listening, self._serve)
        self._losses = LossTelling(self._loop, self.mail, self._send)
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    def follow(self, addresses: Mapping[str, Address], shared: Collection[str] = ()) -> None:
        """Watch exactly these members from now on, except this process itself. With those in ``shared``, which watch
        this process, too, one connection is enough: the one whose name is first makes it."""
        wanted = {member: address for member, address in addresses.items() if member != self.me}
        with self._lock:
            for member in set(self._peers) - set(wanted):
                self._cancel(self._peers.pop(member))
            for member, address in wanted.items():
                peer = self._peers.get(member)
                if peer is None:
                    peer = self._peers[member] = WatchedPeer((address[0], address[1]), SignsOfLife(self.interval))
                    self._loop.call_soon_threadsafe(self._start, member, peer)
                if peer.is_shared and member not in shared:  # this side may have waited for the other's connection
                    self._loop.call_soon_threadsafe(self._tell_came)
                peer.is_shared = member in shared

    def enter(self, number: int, members: Sequence[str], passes_on: bool) -> None:
        """From now on messages are about a generation, see `Mailbox.enter`. Members that are lost to this process
        already are told again."""
        self.mail.enter(number, members, passes_on)
        self.expect(len(members))
        with self._lock:
            lost = {member: str(peer.view) for member, peer in self._peers.items() if peer.view in ("gone", "silent")}
        self._loop.call_soon_threadsafe(self._losses.note, lost)

    def expect(self, callers: int) -> None:
        """Have room for so many callers at once that have not yet authenticated."""
        self._door.most_unproven = max(self._door.most_unproven, callers)

    def statuses(self) -> dict[str, PeerStatus]:
        """Return the status of each followed member as this process sees it."""
        with self._lock:
            return {member: peer.view for member, peer in self._peers.items()}

    def seconds_since_heard(self) -> dict[str, float]:
        """Return the seconds since each followed member was last heard."""
        now = time.monotonic()
        with self._lock:
            return {member: now - peer.heard_at for member, peer in self._peers.items()}

    def broadcast(self, message: dict[str, Any]) -> None:
        """Send a message to all followers of this process, without an answer or a guarantee of delivery. In a large
        world they pass it on, and one that this process has passed on already is not sent again."""
        if (line := self.mail.tell(message)) is not None:
            self._loop.call_soon_threadsafe(self._send, line, "", json.loads(line))

    def write_letter(self, member: str, letter: Mapping[str, Any]) -> None:
        """Send a letter to a member: to a followed one in the place of an earlier one, now or as soon as it is reached;
        to another one if it has a connection to this process."""
        line = line_of(letter)
        with self._lock:
            if (peer := self._peers.get(member)) is not None:
                peer.letter = line
        self._loop.call_soon_threadsafe(self._post, member, line)

    def linked(self) -> frozenset[str]:
        """Return the members with a connection to this process, whoever has made it."""
        return self._linked

    def take_messages(self) -> list[dict[str, Any]]:
        """Return the messages that have come since the last call."""
        return self.mail.take_messages()

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
        self._loop.create_task(self._pulse())
        try:
            self._loop.run_forever()
        finally:
            self._door.close()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
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
        self.mail.notify()
        self.on_change()

    def _post(self, member: str, line: bytes) -> None:
        if line and (writer := self._links().get(member)) is not None:
            self._write(writer, line)

    def _links(self) -> dict[str, asyncio.StreamWriter]:
        """Return one connection to each member that this process can write to, its own before the other's."""
        links = {member: writer for writer, member in self._followers.items()}
        with self._lock:
            return links | {member: peer.writer for member, peer in self._peers.items() if peer.writer is not None}

    def _write(self, writer: asyncio.StreamWriter, line: bytes) -> None:
        if not writer.is_closing():
            writer.write(line)
            self.sent_lines += 1

    def _take(self, sender: str, line: bytes) -> None:
        """Take in a line that is no beat: a message, or a letter that is kept or sent on."""
        value = json.loads(line)
        if not isinstance(value, dict):
            raise ValueError("a line is an object")
        if "candidacy" in value:
            self._deliver(value, sender)
            return
        if "member" not in value:
            is_news, passed_on = self.mail.hear(value, sender)
            if passed_on is not None:
                self._send(passed_on, sender, value)
            if is_news:
                if "lost" in value:
                    self._losses.tell_soon()
                self._notify()
        elif "pulse" in value and (peer := self._peers.get(sender)) is not None:
            peer.pulse_at = time.monotonic()

    def _deliver(self, letter: dict[str, Any], sender: str) -> None:
        """Keep a letter that is for this process; send another one on towards its reader, if the way is known."""
        next_one = self.mail.put_letter(letter, sender)
        if next_one is None:
            self._notify()
        elif (writer := self._links().get(next_one)) is not None:
            self._write(writer, line_of(letter))

    def _send(self, line: bytes, but: str = "", message: Mapping[str, Any] = _NOTHING) -> None:
        links = {writer: member for member, writer in self._links().items()} if self.mail.passes_on else self._followers
        readers = self.mail.choose_readers(message, links.values())
        for writer, member in links.items():
            if member != but and member in readers:
                self._write(writer, line)

    async def _serve(self, connection: socket.socket) -> None:
        """Serve one follower: once it is authenticated, answer each of its lines with one."""
        writer, task = None, asyncio.current_task()
        assert task is not None
        try:
            reader, writer, caller = await admit_peer(connection, self.key, self.me, self._tls)
            self._door.admit(task)
            self._followers[writer] = caller
            self._tell_came()
            answer = line_of({"member": self.me})
            writer.write(answer)
            while line := await reader.readline():
                if (peer := self._peers.get(caller)) is not None and peer.is_shared:
                    self._set(caller, peer, "here")
                if line != b"\n":
                    self._take(caller, line)
                    continue
                writer.write(answer)
                self.sent_lines += 1
                await writer.drain()
        except (TimeoutError, OSError, ValueError, EOFError, asyncio.CancelledError):
            pass
        finally:
            if writer is not None:
                self._followers.pop(writer, None)
                writer.transport.abort()
                self._tell_came()

    async def _follow(self, member: str, peer: WatchedPeer) -> None:
        """Hold a connection and reconnect when it breaks, at once the first time: a dead process refuses it."""
        if peer.is_shared and self.mail.passes_on:
            await asyncio.sleep(random.random() * min(SPREAD_SECONDS, len(self.mail.members) / SPREAD_MEMBERS))
        while True:
            # Where a connection has broken, this side looks at once what has become of the other one.
            if peer.is_shared and member < self.me and (peer.view == "unknown" or member in self._followers.values()):
                await self._await_shared(member, peer)
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
            peer.failures = peer.failures + 1 if peer.heard_at == heard_at else 0
            doubled = 2 ** min(peer.failures - 1, MOST_DOUBLED) if self.mail.passes_on else 1
            await asyncio.sleep(RETRY_SECONDS * doubled if peer.failures else 0)

    async def _await_shared(self, member: str, peer: WatchedPeer) -> None:
        """Wait, while it is shared, for the connection that a member makes to this process, and then for its end."""
        until = time.monotonic() + SHARED_SECONDS
        while peer.is_shared and ((is_there := member in self._followers.values()) or time.monotonic() < until):
            came = self._came
            with suppress(TimeoutError):
                await asyncio.wait_for(came.wait(), None if is_there else until - time.monotonic())
            if is_there and member not in self._followers.values():
                return

    def _tell_came(self) -> None:
        """Wake those who wait for a connection to come or to end."""
        self._note_links()
        self._came.set()
        self._came = asyncio.Event()

    def _note_links(self) -> None:
        """Say which connections there are now; a letter may wait for one."""
        self._linked = frozenset(self._links())
        if self.mail.passes_on:
            self.mail.notify()

    async def _converse(self, member: str, peer: WatchedPeer) -> None:
        """Connect, and read until the connection ends. Returns or raises when it has."""
        async with self._connecting if peer.is_shared else nullcontext():
            reader, writer = await connect_peer(peer.address, self.key, self.me, member, self._tls)
        try:
            peer.dropped, peer.writer = 0, writer
            self._note_links()
            self._post(member, peer.letter)
            beating = self._loop.create_task(self._beat(peer, writer))
            try:
                while line := await reader.readline():  # the first says that the other side has admitted this process
                    self._set(member, peer, "here")
                    self._take(member, line)
            finally:
                beating.cancel()
        finally:
            peer.writer = None
            writer.transport.abort()
            self._note_links()

    async def _beat(self, peer: WatchedPeer, writer: asyncio.StreamWriter) -> None:
        """Ask a peer for a sign of life at each beat, unless it gives them unasked."""
        while True:
            await asyncio.sleep(self._pause())
            if not self.mail.passes_on or time.monotonic() - peer.pulse_at > 1.5 * self._pause():
                writer.write(b"\n")
                self.sent_lines += 1

    async def _pulse(self) -> None:
        """In a large world, give all followers a sign of life at each beat."""
        while True:
            await asyncio.sleep(self._pause())
            if self.mail.passes_on:
                self._send(line_of({"member": self.me, "pulse": True}))

    def _pause(self) -> float:
        """Return the seconds between two beats to one peer."""
        return self.interval * max(1.0, len(self._peers) / PEERS_PER_BEAT)

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
            if view in ("gone", "silent"):
                self._losses.note({member: view})
            self._notify()
